from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from gradaccum import Accumulator, Objective, StateError, master_weights
from tests.engine.reference import CLASSES, CLASSIFICATION, FEATURES, make_model, same_state, window_of

KINDS = ["float32", "fp16", "masters"]


def build(kind: str) -> tuple[nn.Module, Accumulator]:
    """A model with dropout (so that the random state matters) and everything that can have state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    masters = master_weights(model.bfloat16()) if kind == "masters" else None
    optimizer = torch.optim.AdamW(model.parameters() if masters is None else masters, lr=0.01, fused=True)
    return model, Accumulator(
        model,
        optimizer,
        CLASSIFICATION,
        scheduler=CosineAnnealingLR(optimizer, 10),
        clip_norm=0.5,
        precision="fp16" if kind == "fp16" else "float32",
        master_weights=masters,
    )


def train(kind: str, accumulator: Accumulator, windows: range) -> None:
    dtype = torch.bfloat16 if kind == "masters" else torch.float32
    for _ in windows:
        cut = [random.randint(1, 5), 4, int(np.random.randint(1, 5))]
        accumulator.step(window_of(cut, dtype))


def resume(kind: str, start: int, stop: int, folder: Path) -> None:
    """What the new process does: continue the saved run and save it again."""
    model, accumulator = build(kind)
    saved = torch.load(folder / "saved.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    accumulator.load_state_dict(saved["accumulator"])
    assert accumulator.steps == start
    train(kind, accumulator, range(start, stop))
    torch.save({"model": model.state_dict(), "accumulator": accumulator.state_dict()}, folder / "resumed.pt")


@pytest.mark.parametrize(("kind", "boundary"), [("float32", 1), ("float32", 4), ("fp16", 2), ("masters", 3)])
def test_a_run_resumed_in_a_new_process_continues_bit_for_bit(kind: str, boundary: int, tmp_path: Path) -> None:
    random.seed(0)
    np.random.seed(0)
    model, accumulator = build(kind)
    train(kind, accumulator, range(boundary))
    torch.save({"model": model.state_dict(), "accumulator": accumulator.state_dict()}, tmp_path / "saved.pt")
    train(kind, accumulator, range(boundary, 5))
    code = (
        f"from pathlib import Path; from tests.engine.test_state import resume; "
        f"resume({kind!r}, {boundary}, 5, Path({str(tmp_path)!r}))"
    )
    paths = [path for path in sys.path if path]
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"], check=True, timeout=120)
    resumed = torch.load(tmp_path / "resumed.pt", weights_only=True)
    assert same_state(resumed, {"model": model.state_dict(), "accumulator": accumulator.state_dict()})


@pytest.mark.parametrize("where", ["count", "loss_sum"])
def test_state_is_refused_in_the_middle_of_a_window(where: str) -> None:
    model = make_model()

    def ask(name: str) -> None:
        if name == where:
            accumulator.state_dict()

    objective = Objective(
        loss_sum=lambda model, batch: (ask("loss_sum"), CLASSIFICATION.loss_sum(model, batch))[1],
        count=lambda batch: (ask("count"), CLASSIFICATION.count(batch))[1],
    )
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), objective)
    with pytest.raises(StateError, match="in the middle of a window"):
        accumulator.step(window_of([5, 4, 3]))
    assert accumulator.state_dict()["steps"] == 0


def test_callbacks_may_ask_for_the_state_of_the_step_just_done() -> None:
    model, steps = make_model(), []
    accumulator = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        CLASSIFICATION,
        after_step=[lambda _: steps.append(accumulator.state_dict()["steps"])],
    )
    accumulator.step(window_of([5, 4, 3]))
    accumulator.step(window_of([5, 4, 3]))
    assert steps == [1, 2]


@pytest.mark.parametrize(
    ("saved", "given", "part"), [("fp16", "float32", "loss_scale"), ("float32", "masters", "mast")]
)
def test_state_of_other_parts_is_refused(saved: str, given: str, part: str) -> None:
    state = build(saved)[1].state_dict()
    _, accumulator = build(given)
    with pytest.raises(StateError, match=f"the state holds (a|no) {part}"):
        accumulator.load_state_dict(state)
    assert accumulator.steps == 0


def test_a_window_inside_a_window_is_refused() -> None:
    model = nn.Linear(4, 1)

    def loss_sum(m: nn.Module, batch: Tensor) -> Tensor:
        accumulator.step([batch])
        return m(batch).sum()

    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), Objective(loss_sum, len))
    with pytest.raises(StateError, match=r"step\(\) was called in the middle of a window"):
        accumulator.step([torch.ones(2, 4)])


def unfit(change: Callable[[dict[str, Any]], object]) -> Callable[[], dict[str, Any]]:
    def state() -> dict[str, Any]:
        _, accumulator = build("masters")
        train("masters", accumulator, range(1))
        found = copy.deepcopy(accumulator.state_dict())
        change(found)
        return {**found, "steps": 9}

    return state


def other_optimizer(state: dict[str, Any]) -> None:
    model = make_model()
    state["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()


def other_shapes(state: dict[str, Any]) -> None:
    for of_parameter in state["optimizer"]["state"].values():
        of_parameter["exp_avg"] = torch.zeros(1)


UNFIT = {
    "a part is missing": (unfit(lambda state: state.pop("loss_scale")), "the state lacks loss_scale"),
    "no state": (lambda: None, "the state is a NoneType"),
    "one row of each master weight": (
        unfit(lambda state: state.update(master_weights=[each[:1] for each in state["master_weights"]])),
        r"master weights have other shapes .* \(\[\(1, 6\)",
    ),
    "fewer master weights": (unfit(lambda state: state["master_weights"].pop()), "3 master weights"),
    "half of the random state": (unfit(lambda state: state["random"].pop("numpy")), "lacks the random state of numpy"),
    "no groups": (
        unfit(lambda state: state.update(optimizer={"state": {}, "param_groups": []})),
        r"groups of \[\] parameters, this one groups of \[4\]",
    ),
    "another optimizer": (unfit(other_optimizer), "another kind of optimizer than AdamW: it sets .*momentum"),
    "state of other shapes": (unfit(other_shapes), r"exp_avg has the shape \(1,\), its parameter \(8, 6\)"),
}


@pytest.mark.parametrize(("make", "message"), UNFIT.values(), ids=UNFIT)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(make: Callable[[], Any], message: str) -> None:
    state = make()
    _, accumulator = build("masters")
    before = copy.deepcopy(accumulator.state_dict())
    with pytest.raises(StateError, match=message):
        accumulator.load_state_dict(state)
    assert same_state(accumulator.state_dict(), before)


def with_parts(optimizer: type[torch.optim.Optimizer], *schedulers: Callable[[Any], Any]) -> Accumulator:
    model = make_model()
    own = optimizer(model.parameters(), lr=0.01)
    chained = [make(own) for make in schedulers]
    schedule = torch.optim.lr_scheduler.ChainedScheduler(chained) if len(chained) > 1 else next(iter(chained), None)
    return Accumulator(model, own, CLASSIFICATION, scheduler=schedule)


def step_lr(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def cosine(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, 9)


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        ((torch.optim.Adam,), (torch.optim.RAdam,)),
        ((torch.optim.Adam,), (torch.optim.Adamax,)),
        ((torch.optim.SGD, step_lr), (torch.optim.SGD, cosine)),
        ((torch.optim.SGD, step_lr, cosine), (torch.optim.SGD, step_lr, step_lr)),
    ],
)
def test_state_of_another_kind_of_part_is_refused_and_changes_nothing(saved: Any, given: Any) -> None:
    source, target = with_parts(*saved), with_parts(*given)
    source.step(window_of([4]))
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(StateError, match=r"the state is of .*, but this accumulator has"):
        target.load_state_dict(source.state_dict())
    assert same_state(target.state_dict(), before)


def test_a_state_can_be_gone_back_to_again_and_again() -> None:
    model, accumulator = build("float32")
    train("float32", accumulator, range(1))
    held = copy.deepcopy((model.state_dict(), accumulator.state_dict()))
    ends = []
    for _ in range(2):
        model.load_state_dict(held[0])
        accumulator.load_state_dict(held[1])
        train("float32", accumulator, range(3))
        ends.append(copy.deepcopy(accumulator.state_dict()))
    assert same_state(*ends)

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
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

"""A training run's state at a window boundary, beside the model's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradaccum.engine import gradients
from gradaccum.engine.precision import LossScale
from gradaccum.engine.random_state import random_state, require_random_state, set_random_state
from gradaccum.errors import StateError

if TYPE_CHECKING:
    from gradaccum.engine.accumulator import Accumulator

PARTS = ("scheduler", "loss_scale", "master_weights")
"""What an accumulator may lack."""

BY_ENTRY = frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
"""What torch's optimizers keep for each entry of a parameter, in its shape."""


def in_mid_window(call: str) -> StateError:
    """Of what only makes sense between windows."""
    return StateError(
        f"{call} was called in the middle of a window, and a gradient accumulated half can be neither continued nor "
        "kept. Call it between two step() calls, or from after_step."
    )


def state_of(run: Accumulator) -> dict[str, Any]:
    """Copies of nothing: save it, or copy it, before the next window."""
    return {
        "steps": run.steps,
        "kinds": _kinds(run),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
        "loss_scale": None if run.loss_scale is None else asdict(run.loss_scale),
        "master_weights": None if run.master_weights is None else [w.detach() for w in run.master_weights],
        "random": random_state(),
    }


def restore(run: Accumulator, state: Mapping[str, Any]) -> None:
    """Put an accumulator of the same parts where the state was taken.

    Raises:
        StateError: it has other parts; then nothing has changed.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"the state is a {type(state).__name__}. Give what Accumulator.state_dict() returned.")
    missing = {"steps", "kinds", "optimizer", "random", *PARTS} - state.keys()
    if missing:
        raise StateError(f"the state lacks {', '.join(sorted(missing))}. Give what Accumulator.state_dict() returned.")
    for part in PARTS:
        has, given = getattr(run, part) is not None, state[part] is not None
        if has != given:
            raise StateError(
                f"the state holds {'a' if given else 'no'} {part}, but this accumulator has "
                f"{'one' if has else 'none'}, and the run would not continue. Build it with the same parts."
            )
    if state["kinds"] != (kinds := _kinds(run)):
        raise StateError(
            f"the state is of {' and '.join(state['kinds'])}, but this accumulator has {' and '.join(kinds)}, and the "
            "run would not continue. Build it with the same parts."
        )
    _require_same_shapes(run.master_weights or (), state["master_weights"] or ())
    _require_same_optimizer(run.optimizer, state["optimizer"])
    require_random_state(state["random"])
    run.optimizer.load_state_dict(deepcopy(state["optimizer"]))  # which would go on in the caller's own tensors
    if run.scheduler is not None:
        run.scheduler.load_state_dict(state["scheduler"])
    if run.loss_scale is not None:
        run.loss_scale = LossScale(**state["loss_scale"])
    with torch.no_grad():
        gradients.copy([*(run.master_weights or ())], state["master_weights"] or [])
    set_random_state(state["random"])
    run.steps = state["steps"]


def _kinds(run: Accumulator) -> list[str]:
    """What cannot be told by the state of a scheduler or an optimizer, which may fit another kind of it."""
    schedulers: list[Any] = []
    waiting: list[Any] = [] if run.scheduler is None else [run.scheduler]
    while waiting:
        schedulers.append(scheduler := waiting.pop(0))
        waiting += getattr(scheduler, "_schedulers", ())  # of ChainedScheduler and SequentialLR
    return [type(part).__name__ for part in (run.optimizer, *schedulers)]


def _require_same_shapes(masters: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    has, given = ([tuple(each.shape) for each in tensors] for tensors in (masters, saved))
    if has != given:
        raise StateError(
            f"the state's {len(given)} master weights have other shapes than this model's {len(has)} ({given} against "
            f"{has}), so it is another model's. Build the model that was saved."
        )


def _require_same_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """torch takes any state whose groups are of the right length, and fails, or goes wrong, at the next step."""
    saved = state["param_groups"]
    lengths = [len(group["params"]) for group in saved]
    if lengths != (own := [len(group["params"]) for group in optimizer.param_groups]):
        raise StateError(
            f"the state's optimizer steps groups of {lengths} parameters, this one groups of {own}, so the run would "
            "not continue. Build model and optimizer as they were."
        )
    for group, current in zip(saved, optimizer.param_groups, strict=True):
        extra, lacking = group.keys() - current.keys(), current.keys() - group.keys()
        if extra and lacking:  # other versions of one optimizer differ in one direction only
            raise StateError(
                f"the state is of another kind of optimizer than {type(optimizer).__name__}: it sets "
                f"{', '.join(sorted(extra))}, and knows no {', '.join(sorted(lacking))}. Build the optimizer that was "
                "saved."
            )
        for index, parameter in zip(group["params"], current["params"], strict=True):
            _require_own_state(state["state"].get(index, {}), parameter)


def _require_own_state(saved: Mapping[str, Any], parameter: Tensor) -> None:
    for kind in BY_ENTRY & saved.keys():
        if saved[kind] is not None and saved[kind].shape != parameter.shape:
            raise StateError(
                f"the state's {kind} has the shape {tuple(saved[kind].shape)}, its parameter {tuple(parameter.shape)}, "
                "so it is another model's. Build the model that was saved."
            )

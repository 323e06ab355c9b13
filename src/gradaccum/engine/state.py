"""A training run's state at a window boundary, beside the model's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from gradaccum.engine import gradients
from gradaccum.engine.precision import LossScale
from gradaccum.engine.random_state import random_state, set_random_state
from gradaccum.errors import StateError

if TYPE_CHECKING:
    from gradaccum.engine.accumulator import Accumulator

PARTS = ("scheduler", "loss_scale", "master_weights")
"""What an accumulator may lack."""


def require_boundary(call: str, *, in_window: bool) -> None:
    """Refuse what only makes sense between windows."""
    if in_window:
        raise StateError(
            f"{call} was called in the middle of a window, and a gradient accumulated half can be neither continued "
            "nor kept. Call it between two step() calls, or from after_step."
        )


def state_of(run: Accumulator) -> dict[str, Any]:
    """Copies of nothing: save it, or copy it, before the next window."""
    return {
        "steps": run.steps,
        "optimizer": run.optimizer.state_dict(),
        "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
        "loss_scale": None if run.loss_scale is None else asdict(run.loss_scale),
        "master_weights": None if run.master_weights is None else [w.detach() for w in run.master_weights],
        "random": random_state(),
    }


def restore(run: Accumulator, state: Mapping[str, Any]) -> None:
    """Put an accumulator of the same parts where the state was taken.

    Raises:
        StateError: it has other parts.
    """
    missing = {"steps", "optimizer", "random", *PARTS} - state.keys()
    if missing:
        raise StateError(f"the state lacks {', '.join(sorted(missing))}. Give what Accumulator.state_dict() returned.")
    for part in PARTS:
        has, given = getattr(run, part) is not None, state[part] is not None
        if has != given:
            raise StateError(
                f"the state holds {'a' if given else 'no'} {part}, but this accumulator has "
                f"{'one' if has else 'none'}, and the run would not continue. Build it with the same parts."
            )
    run.optimizer.load_state_dict(state["optimizer"])
    if run.scheduler is not None:
        run.scheduler.load_state_dict(state["scheduler"])
    if run.loss_scale is not None:
        run.loss_scale = LossScale(**state["loss_scale"])
    with torch.no_grad():
        gradients.copy([*(run.master_weights or ())], state["master_weights"] or [])
    set_random_state(state["random"])
    run.steps = state["steps"]

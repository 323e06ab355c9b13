"""Metrics and points as the efficiency and scaling stages write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradaccum.results.sentences import QUARTERS


def between(name: str, values: Sequence[float | None]) -> dict[str, Any]:
    """A value and the ends of its interval, as fields."""
    return {f"{name}{end}": value for end, value in zip(("", "_low", "_high"), values, strict=True)}


def by_quarter(quarters: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """The noise scale of each quarter, with its interval."""
    fields: dict[str, Any] = {}
    for name, values in zip(QUARTERS, quarters, strict=True):
        fields |= between(name, values)
    return fields


def against(arm: str, above: Sequence[float], *, failed: int = 0) -> dict[str, Any]:
    """What decides about an arm of a published rule."""
    found = between(f"{arm}_loss_above", above)
    return {**found, f"{arm}_failed_runs": failed, f"{arm}_is_worse": failed > 0 or above[1] > 0}


EFFICIENCY: dict[str, Any] = {
    "reference_effective_batch": 16,
    **between("reference_validation_loss", (0.2, 0.18, 0.22)),
    **between("validation_loss_before", (2.3, 2.2, 2.4)),
    "worth_it_up_to_effective_batch": 128,
    **between("worth_it_loss_above_reference", (0.005, -0.01, 0.02)),
    "worse_from_effective_batch": 256,
    **between("worse_from_loss_above_reference", (0.2, 0.1, 0.3)),
    "worse_from_failed_runs": 0,
    "target_loss": 0.2,
    "common_target_loss": 0.4,
    "noise_scale_effective_batch": 128,
    **by_quarter([(30.0, 20.0, 45.0)] * 4),
    "failed_runs": 0,
    "seeds": 3,
}
SCALING: dict[str, Any] = {
    "linear/base_effective_batch": 16,
    "linear/base_failed_runs": 0,
    "linear/base_validation_loss": 0.1,
    "linear/effective_batch": 128,
    "linear/times": 8.0,
    **against("linear/warm_up", (0.01, -0.02, 0.04)),
    **against("linear/no_warm_up", (0.02, 0.01, 0.03)),
    **against("linear/unscaled", (1.9, 1.8, 2.0)),
    "half_life/base_effective_batch": 64,
    "half_life/base_failed_runs": 0,
    "half_life/base_validation_loss": 0.3,
    "half_life/effective_batch": 4,
    **against("half_life/twice_lr", (0.01, -0.02, 0.04)),
    **against("half_life/kept", (-0.01, -0.05, 0.03)),
    **against("half_life/fixed", (0.02, 0.01, 0.03)),
    "seeds": 3,
}
ARM: dict[str, Any] = {
    "steps": 8,
    "lr": 0.05,
    "beta2": None,
    **between("validation_loss", (0.5, 0.4, 0.6)),
    "validation_accuracy": 0.9,
    **between("loss_above_reference", (0.02, -0.01, 0.05)),
    **by_quarter([(30.0, 20.0, None)] * 4),
    **between("samples_to_target", (40.0, 30.0, 50.0)),
    **between("samples_to_common_target", (20.0, 10.0, 30.0)),
    "seeds": 3,
    "failed_runs": 0,
}
RULED: dict[str, Any] = {
    **between("loss_above_base", (0.1, 0.05, 0.15)),
    **between("loss_above_rule", (0.01, -0.05, 0.07)),
    "departs_from": 8,
}

KINDS = ("parameters", "gradients", "optimizer_state", "inputs", "activations", "temporaries")
"""Of memory."""

DIFFS = {"grad_rel_diff_float64": 1e-16, "max_grad_diff": 0.0}

MISTAKE = {"grad_norm_ratio": 8.0, "param_diff_step1": 0.125, "final_loss": None, "diverged_at_step": 4}


def point(series: str, accum_steps: int, **fields: Any) -> dict[str, Any]:
    return {
        "series": series,
        "effective_batch": 8,
        "accum_steps": accum_steps,
        "micro_batch": 4,
        "world_size": 1,
        **fields,
    }

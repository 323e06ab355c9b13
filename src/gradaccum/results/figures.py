"""The figures of each stage, drawn from its curve and tables, as PNG bytes.

Beside `canvas`, `cost_figures`, `rightness_figures` and `value_figures` the only user of matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure

from gradaccum.results import cost_figures, rightness_figures, value_figures
from gradaccum.results.canvas import png
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Table

Tables = Mapping[str, Table]


def of_stage(curve: Curve, tables: Tables) -> dict[str, bytes]:
    """The figures of a stage by their file names; empty where it has none."""
    return {f"{name}.png": png(draw(curve, tables)) for name, draw in _DRAW.get(curve.stage, {}).items()}


def worth(rows: Table, efficiency: Mapping[str, Any], *, untimed: str | None) -> bytes:
    """The report's own: time to the target losses against the effective batch."""
    return png(value_figures.worth(rows, efficiency, untimed=untimed))


def _alone(draw: Callable[[Curve], Figure]) -> Callable[[Curve, Tables], Figure]:
    """A figure that needs no table."""
    return lambda curve, _: draw(curve)


_DRAW: Mapping[str, Mapping[str, Callable[[Curve, Tables], Figure]]] = {
    "throughput": {"throughput": cost_figures.throughput},
    "equivalence": {"equivalence": _alone(rightness_figures.equivalence)},
    "ablation": {"ablation": rightness_figures.ablation},
    "memory": {"memory": _alone(cost_figures.memory)},
    "plan": {"plan": _alone(cost_figures.plan)},
    "efficiency": {"efficiency": value_figures.learning, "noise_scale": value_figures.noise_scale},
    "distributed": {"distributed": _alone(cost_figures.distributed)},
    "scaling": {"linear_scaling": _alone(value_figures.linear_scaling), "half_life": _alone(value_figures.half_life)},
}

"""The memory measurement's results: headline, curve, and the sentences that explain them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from gradaccum.measurements.memory import Config
from gradaccum.measurements.tally import KINDS, Peak
from gradaccum.measurements.window_memory import Seen, Window
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome, Row
from gradaccum.results.sizes import HEADROOM, shown_bytes

EXACT = 1e-3
"""A prediction further than this from the tally of the real window is wrong."""

FLAT = 1e-2
"""A peak that grows by more than this from N=2 on holds something of every micro-batch."""

LOSS_BYTES = 16
"""Of every micro-batch its loss is kept, a number; next to a tiny model that is no small share."""

SCRATCH_BYTES = 16 * 2**20
"""What kernels may take for themselves, which no tally sees."""

TELLING_BYTES = 10 * SCRATCH_BYTES
"""A window predicted to take less would agree with what was seen whatever was predicted for it, so it is not judged."""


@dataclass(frozen=True)
class Checked:
    """One window: predicted and seen."""

    window: Window
    predicted: Peak
    seen: Seen

    @property
    def error(self) -> float:
        """Of the prediction, relative to the tally of the real window."""
        return self.predicted.total / self.seen.tally.total - 1

    @property
    def outside_bytes(self) -> int | None:
        """What was seen from outside: by the device where there is one, else by the system."""
        return self.seen.process_bytes if self.seen.device_bytes is None else self.seen.device_bytes

    @property
    def but_inputs(self) -> int:
        """The peak without the window's inputs, which are its samples and grow with them."""
        return self.predicted.total - self.predicted.by_kind["inputs"]


def outcome(checked: Sequence[Checked], config: Config, largest: int | None) -> Outcome:
    return Outcome(
        metrics=headline(checked, largest),
        curve=Curve("memory", "accum_steps", tuple(point(each, config) for each in checked)),
        summary=[row(each) for each in checked],
        findings=list(findings(checked, config, largest)),
        failures=list(failures(checked)),
    )


def headline(checked: Sequence[Checked], largest: int | None) -> dict[str, Any]:
    outside = [each for each in checked if each.outside_bytes is not None]
    judged = list(filter(tells, outside))
    return {
        "max_prediction_error": max(abs(each.error) for each in checked),
        "max_growth_in_accum_steps": max((growth for _, growth in growths(checked)), default=None),
        "activation_bytes_per_sample": per_sample(checked),
        "max_predicted_bytes": max(each.predicted.total for each in checked),
        "max_outside_excess_bytes": max((excess(each) for each in outside), default=None),
        "outside_windows_judged": len(judged),
        "outside_agrees": all(map(agrees, judged)) if judged else None,
        "largest_micro_batch_in_budget": largest,
    }


def per_sample(checked: Sequence[Checked]) -> float:
    largest = max(checked, key=lambda each: each.window.micro_batch)
    return largest.predicted.by_kind["activations"] / largest.window.micro_batch


def excess(each: Checked) -> int:
    assert each.outside_bytes is not None
    return each.outside_bytes - each.predicted.total


def tells(each: Checked) -> bool:
    """Whether a wrong prediction of this window could be seen from outside."""
    return each.predicted.total >= TELLING_BYTES


def agrees(each: Checked) -> bool:
    """Within 10 % and what kernels take for themselves."""
    return abs(excess(each)) <= 0.1 * each.predicted.total + SCRATCH_BYTES


def growths(checked: Sequence[Checked]) -> Iterator[tuple[int, float]]:
    """For each micro-batch, how the peak without inputs grows from the least N above 1 to the largest."""
    for micro, group in groupby(checked, key=lambda each: each.window.micro_batch):
        several = sorted((each.window.accum_steps, each.but_inputs) for each in group if each.window.accum_steps > 1)
        if len(several) > 1:
            (few, first), (many, last) = several[0], several[-1]
            yield micro, (last - first) / first if last - first > LOSS_BYTES * (many - few) else 0.0


def point(each: Checked, config: Config) -> Row:
    window = each.window
    return {
        "series": f"{config.optimizer}/micro_batch={window.micro_batch}",
        "effective_batch": window.micro_batch * window.accum_steps,
        "accum_steps": window.accum_steps,
        "micro_batch": window.micro_batch,
        "world_size": 1,
        "predicted_bytes": each.predicted.total,
        **{f"{kind}_bytes": each.predicted.by_kind[kind] for kind in KINDS},
        "tally_bytes": each.seen.tally.total,
        "prediction_error": each.error,
        "process_bytes": each.seen.process_bytes,
        "device_bytes": each.seen.device_bytes,
    }


def row(each: Checked) -> Row:
    kinds = each.predicted.by_kind
    return {
        "micro x N": f"{each.window.micro_batch} x {each.window.accum_steps}",
        "predicted": shown_bytes(each.predicted.total),
        "tally": shown_bytes(each.seen.tally.total),
        "error": f"{each.error:.2%}",
        "seen outside": None if each.outside_bytes is None else shown_bytes(each.outside_bytes),
        "parameters": shown_bytes(kinds["parameters"]),
        "gradients": shown_bytes(kinds["gradients"]),
        "state": shown_bytes(kinds["optimizer_state"]),
        "inputs": shown_bytes(kinds["inputs"]),
        "activations": shown_bytes(kinds["activations"]),
        "temporaries": shown_bytes(kinds["temporaries"]),
    }


def findings(checked: Sequence[Checked], config: Config, largest: int | None) -> Iterator[str]:
    yield (
        f"Predicted without running: within {max(abs(each.error) for each in checked):.2%} of the same tally over the "
        f"real window's tensors, at all {len(checked)} points."
    )
    grown = [growth for _, growth in growths(checked)]
    if grown:
        yield (
            f"From N=2 on, memory but for the inputs grows by {max(grown):.2%}: accumulating costs the gradient beside "
            "the micro-batch's own, once. What grows is linear in the micro-batch: "
            f"{shown_bytes(per_sample(checked))} of activations a sample."
        )
    outside = [each for each in checked if each.outside_bytes is not None]
    if outside:
        yield from_outside(outside)
    yield budget(config, largest)


def from_outside(outside: Sequence[Checked]) -> str:
    """The check that shares nothing with the prediction."""
    least, most = min(map(excess, outside)), max(map(excess, outside))
    said = (
        f"Seen from outside, by {'the system' if outside[0].seen.device_bytes is None else 'the device'}, windows took "
        f"{signed(least)} to {signed(most)} beside what was predicted"
    )
    judged = list(filter(tells, outside))
    if not judged:
        return (
            f"{said}; that judges none of them, because none is predicted above {shown_bytes(TELLING_BYTES)}, where "
            f"the {shown_bytes(SCRATCH_BYTES)} that kernels may take for themselves weigh little. Add a larger one to "
            "memory.micro_batch."
        )
    off = [f"{each.window.micro_batch} x {each.window.accum_steps}" for each in judged if not agrees(each)]
    said += f"; of the {len(judged)} predicted above {shown_bytes(TELLING_BYTES)}, which alone can tell,"
    if not off:
        return f"{said} all within 10 % of it and {shown_bytes(SCRATCH_BYTES)}, which kernels may take for themselves."
    return (
        f"{said} {len(off)} by over 10 % and {shown_bytes(SCRATCH_BYTES)} ({', '.join(off)}). Kernels of this model "
        "take memory that no tally sees; leave that much headroom."
    )


def signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{shown_bytes(abs(size))}"


def budget(config: Config, largest: int | None) -> str:
    where = f"{shown_bytes(config.budget_bytes)} of {config.budget_device} memory, less {HEADROOM:.0%} headroom"
    if largest is None:
        return f"Not even a micro-batch of 1 fits {where}."
    return f"In {where}, micro-batches of up to {largest} fit (powers of two tried)."


def failures(checked: Sequence[Checked]) -> Iterator[str]:
    for each in checked:
        if abs(each.error) > EXACT:
            yield (
                f"micro_batch={each.window.micro_batch}, accum_steps={each.window.accum_steps}: predicted "
                f"{each.predicted.total} bytes, but the real window's tensors took {each.seen.tally.total} "
                f"({each.error:+.2%}). The model allocates differently when its tensors have values."
            )
    for micro, growth in growths(checked):
        if growth > FLAT:
            yield (
                f"micro_batch={micro}: memory grows by {growth:.1%} with accum_steps, so something of every "
                "micro-batch is kept until the window ends (a loss with its graph, say)."
            )

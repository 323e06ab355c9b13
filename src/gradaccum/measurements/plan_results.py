"""The plan's results: the ranked table, its explanation, and the line that measures it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradaccum.measurements.plan import Config
from gradaccum.measurements.ranking import PAYS, Candidate, Ranking
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome, Row
from gradaccum.results.sizes import HEADROOM, shown_bytes
from gradaccum.results.step_costs import StepCosts


def outcome(ranking: Ranking, config: Config, *, workload: str, costs: StepCosts | None) -> Outcome:
    along = sorted(ranking.ranked, key=lambda each: each.accum_steps)
    return Outcome(
        metrics=headline(ranking.chosen),
        curve=Curve("plan", "accum_steps", tuple(point(each, ranking) for each in along)),
        summary=[row(each, ranking) for each in ranking.ranked],
        findings=[*findings(ranking, config, costs), f"Measure it: {command(ranking.chosen, workload)}"],
    )


def headline(chosen: Candidate) -> dict[str, Any]:
    return {
        "micro_batch": chosen.micro_batch,
        "accum_steps": chosen.accum_steps,
        "world_size": chosen.world_size,
        "predicted_bytes": chosen.predicted_bytes,
        "predicted_step_ms": chosen.step_ms,
        "predicted_samples_per_sec": chosen.samples_per_sec,
    }


def point(each: Candidate, ranking: Ranking) -> Row:
    return {
        "series": "candidates",
        "effective_batch": each.effective_batch,
        "accum_steps": each.accum_steps,
        "micro_batch": each.micro_batch,
        "world_size": each.world_size,
        "predicted_bytes": each.predicted_bytes,
        "predicted_step_ms": each.step_ms,
        "predicted_samples_per_sec": each.samples_per_sec,
        "fits": each.fits(ranking.memory_bytes),
        "chosen": each is ranking.chosen,
    }


def row(each: Candidate, ranking: Ranking) -> Row:
    return {
        "micro-batch": each.micro_batch,
        "N": each.accum_steps,
        "ranks": each.world_size,
        "memory": shown_bytes(each.predicted_bytes),
        "step ms": each.step_ms,
        "samples/s": each.samples_per_sec,
        "why": ranking.reason(each),
    }


def findings(ranking: Ranking, config: Config, costs: StepCosts | None) -> Iterator[str]:
    chosen = ranking.chosen
    time = "" if chosen.step_ms is None else f", {chosen.step_ms:.3g} ms a step, {chosen.samples_per_sec:.0f} samples/s"
    yield (
        f"Set micro_batch={chosen.micro_batch}, accum_steps={chosen.accum_steps}, world_size={chosen.world_size}: "
        f"effective batch {chosen.effective_batch}, {shown_bytes(chosen.predicted_bytes)} of "
        f"{shown_bytes(config.memory_bytes)} {config.memory_device} memory ({HEADROOM:.0%} is left free){time}."
    )
    if costs is None:
        yield (
            "No times of this workload were measured, so the largest micro-batch that fits stands first. "
            "`dvc repro throughput` with this workload measures them."
        )
    else:
        yield (
            "Times are those that the throughput stage measured on this machine, on its own device. A larger "
            f"micro-batch is proposed only where it gains over {PAYS:.0%}. The curve flattens at effective "
            f"batch {costs.flattens_at_effective_batch}: a larger target lowers the gradient's noise, not its cost."
        )
    if config.world_size > 1:
        yield "Reducing gradients over ranks takes a gradient's memory (counted) and time (not predicted here)."


def command(chosen: Candidate, workload: str) -> str:
    """The experiment that measures the plan's own point of the curve."""
    steps = sorted({1, 2, chosen.accum_steps} | {2**power for power in range(chosen.accum_steps.bit_length())})
    listed = ",".join(str(each) for each in steps)
    point = f"-S throughput.micro_batch={chosen.micro_batch} -S 'throughput.accum_steps=[{listed}]'"
    return f"dvc exp run -S workload.name={workload} {point}"

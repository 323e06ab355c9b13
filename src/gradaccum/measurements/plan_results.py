"""The plan's results: the ranked table, its explanation, and the line that measures it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gradaccum.measurements.plan import Config
from gradaccum.measurements.ranking import PAYS, Candidate, Ranking
from gradaccum.measurements.setup import OptimizerName
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome, Row
from gradaccum.results.sizes import HEADROOM, grouped, shown_bytes
from gradaccum.results.step_costs import StepCosts

FEWEST, MOST = 16, 256
"""Up to which N the line measures, at least and at most: five points fix the fit, and far out they add nothing."""

SECONDS = 6
"""What the line allows for timing, at least; times ten steps at every point, which is three short rounds."""

UNKNOWN_SECONDS = 120
"""What it allows where no step was ever timed."""


@dataclass(frozen=True)
class Plan:
    """A ranking, and what it was made for: the target and memory, the workload, its optimizer and measured times."""

    ranking: Ranking
    config: Config
    workload: str
    optimizer: OptimizerName
    costs: StepCosts | None

    @property
    def chosen(self) -> Candidate:
        return self.ranking.chosen


def outcome(plan: Plan) -> Outcome:
    along = sorted(plan.ranking.ranked, key=lambda each: each.accum_steps)
    return Outcome(
        metrics=headline(plan.chosen),
        curve=Curve("plan", "accum_steps", tuple(point(each, plan.ranking) for each in along)),
        summary=[row(each, plan) for each in plan.ranking.ranked],
        findings=list(findings(plan)),
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


def row(each: Candidate, plan: Plan) -> Row:
    return {
        "micro-batch": each.micro_batch,
        "N": each.accum_steps,
        "memory": shown_bytes(each.predicted_bytes),
        **timing(each, plan.costs),
        "why": plan.ranking.reason(each),
    }


def timing(each: Candidate, costs: StepCosts | None) -> Row:
    if costs is None or each.step_ms is None or each.samples_per_sec is None:
        return {}
    guessed = "" if costs.spans(each.micro_batch) else "~"
    return {"ms/step": guessed + grouped(each.step_ms), "samples/s": guessed + grouped(each.samples_per_sec)}


def findings(plan: Plan) -> Iterator[str]:
    chosen, config = plan.chosen, plan.config
    time = (
        ""
        if chosen.step_ms is None or chosen.samples_per_sec is None
        else f", {grouped(chosen.step_ms)} ms a step, {grouped(chosen.samples_per_sec)} samples/s"
    )
    yield (
        f"Set micro_batch={chosen.micro_batch}, accum_steps={chosen.accum_steps}, world_size={chosen.world_size}: "
        f"effective batch {chosen.effective_batch}, {shown_bytes(chosen.predicted_bytes)} of "
        f"{shown_bytes(config.memory_bytes)} {config.memory_device} memory with {plan.optimizer}{time}."
    )
    yield left_free(config)
    if config.world_size > 1:
        yield "Reducing gradients over ranks takes a gradient's memory (counted) and time (not predicted here)."
    if few := config.better_cut():
        yield few
    yield from times(plan)


def left_free(config: Config) -> str:
    fits = f"A plan may take {shown_bytes((1 - HEADROOM) * config.memory_bytes)}; {HEADROOM:.0%} is left free"
    if config.memory_device == "cpu":
        return f"{fits}, for the allocator and what kernels take for themselves."
    return (
        f"{fits}, for what cannot be predicted: CUDA's context, libraries' workspaces (both: some hundred MiB) and "
        "fragmentation. Tensors are counted in the allocator's blocks of 512 bytes."
    )


def times(plan: Plan) -> Iterator[str]:
    costs = plan.costs
    if costs is None:
        yield (
            "No times of this workload were measured, so the largest micro-batch that fits stands first. Measure them, "
            f"then plan again: dvc exp run -S workload.name={plan.workload} -S throughput.seconds={UNKNOWN_SECONDS} "
            "throughput"
        )
        return
    missed = costs.extrapolation_error
    yield (
        "Times are those that the throughput stage measured on this machine, on its own device; for other N they are "
        "N x t_micro + t_step"
        + ("" if missed is None else f", which missed a point that it had not seen by {missed:+.1%}")
        + f". A larger micro-batch is proposed only where it gains over {PAYS:.0%}. The curve flattens at effective "
        f"batch {costs.flattens_at_effective_batch}: a larger target lowers the gradient's noise, not its cost."
    )
    if not all(costs.spans(each.micro_batch) for each in plan.ranking.ranked):
        least, most = min(costs.t_micro_ms), max(costs.t_micro_ms)
        yield f"~ marks micro-batches outside the {least} to {most} measured: their times follow from the nearest one."
    yield f"Measure it: {command(plan.chosen, plan.workload, costs)}"


def command(chosen: Candidate, workload: str, costs: StepCosts) -> str:
    """The experiment that measures the plan's own curve, with a time in which it can be measured."""
    up_to = min(max(chosen.accum_steps, FEWEST), MOST)
    steps = sorted({2**power for power in range(up_to.bit_length())} | {min(chosen.accum_steps, MOST)})
    one_each_ms = costs.frontier_ms + sum(costs.step_ms(chosen.micro_batch, each) for each in steps)
    seconds = max(SECONDS, math.ceil(10 * one_each_ms / 1000))
    return (
        f"dvc exp run -S workload.name={workload} -S throughput.micro_batch={chosen.micro_batch} "
        f"-S 'throughput.accum_steps=[{','.join(map(str, steps))}]' -S throughput.seconds={seconds} throughput"
    )

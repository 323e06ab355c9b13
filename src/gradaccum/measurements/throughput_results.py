"""The throughput measurement's results: headline, curve and frontier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gradaccum.engine.batching import BatchPlan
from gradaccum.measurements.costs import Costs, Measured
from gradaccum.measurements.points import TimedStep
from gradaccum.measurements.setup import Setup
from gradaccum.measurements.throughput import Config
from gradaccum.measurements.throughput_findings import findings
from gradaccum.results.curve import Curve
from gradaccum.results.intervals import ends
from gradaccum.results.outcome import Outcome, Row, StepSeries
from gradaccum.results.sizes import grouped


def outcome(costs: Costs, config: Config, setup: Setup) -> Outcome:
    both = list({each.plan: each for each in [*costs.curve, *costs.frontier]}.values())
    return Outcome(
        metrics=headline(costs, both),
        curve=Curve("throughput", "effective_batch", tuple(point(each, costs, config) for each in costs.curve)),
        summary=[row(each, costs) for each in both],
        findings=list(findings(costs, both, config)),
        failures=list(failures(both)),
        tables={
            "steps": [row for each in both for row in step_rows(each)],
            "frontier": [frontier_row(each, costs, config, setup=setup) for each in costs.frontier],
        },
        series=frontier_series(costs),
    )


def headline(costs: Costs, both: Sequence[Measured]) -> dict[str, Any]:
    fit, best = costs.fit, costs.fit.best
    fastest = max(costs.frontier, key=lambda each: each.point.samples_per_sec)
    return {
        "peak_samples_per_sec": max(each.point.samples_per_sec for each in costs.curve),
        "asymptotic_samples_per_sec": best.asymptotic_samples_per_sec(fit.micro_batch),
        "t_micro_ms": best.t_micro_ms,
        **ends("t_micro_ms", fit.interval(lambda each: each.t_micro_ms)),
        "t_step_ms": best.t_step_ms,
        **ends("t_step_ms", fit.interval(lambda each: each.t_step_ms)),
        "max_rel_residual": best.max_rel_residual,
        "extrapolation_error": fit.extrapolation_error,
        "flattens_at_effective_batch": fit.flattens_at,
        **ends("flattens_at_effective_batch", fit.flattens_interval),
        "matmul_peak_gflops": costs.limit.peak_flops_per_sec / 1e9,
        "max_mfu": max(each.mfu for each in both),
        "frontier_fastest_micro_batch": fastest.plan.micro_batch,
        "frontier_slowest_over_fastest": max(each.ms for each in costs.frontier)
        / min(each.ms for each in costs.frontier),
        "disturbed_visits": sum(each.point.disturbed for each in both),
    }


def point(each: Measured, costs: Costs, config: Config) -> Row:
    steps = each.plan.accum_steps
    return {
        "series": config.optimizer,
        **cut(each),
        "world_size": each.plan.world_size,
        "avg_loss": each.point.avg_loss,
        **timing(each),
        "fitted_step_ms": costs.fit.best.step_ms(steps),
        "step_share": costs.fit.best.step_share(steps),
        "sync_calls": each.point.sync_calls,
        "steps": len(each.point.steps),
    }


def cut(each: Measured) -> Row:
    plan = each.plan
    return {
        "effective_batch": plan.effective_batch,
        "accum_steps": plan.accum_steps,
        "micro_batch": plan.micro_batch,
    }


def timing(each: Measured) -> Row:
    return {
        "samples_per_sec": each.point.samples_per_sec,
        "median_step_ms": each.ms,
        **ends("step_ms", each.interval),
        "round_spread": each.point.round_spread,
        "mfu": each.mfu,
        "rounds": len(each.point.visits),
        "disturbed_visits": each.point.disturbed,
    }


def frontier_row(each: Measured, costs: Costs, config: Config, *, setup: Setup) -> Row:
    return {
        "workload": setup.workload.name,
        "optimizer": config.optimizer,
        **cut(each),
        **timing(each),
        "t_micro_ms": costs.t_micro_ms(each),
        "steps": len(each.point.steps),
    }


def frontier_series(costs: Costs) -> list[StepSeries]:
    """The frontier over its micro-batches, for the tracker."""
    along = sorted(costs.frontier, key=lambda each: each.plan.micro_batch)
    micro = [each.plan.micro_batch for each in along]
    return [
        StepSeries("frontier/samples_per_sec", micro, [each.point.samples_per_sec for each in along]),
        StepSeries("frontier/median_step_ms", micro, [each.ms for each in along]),
        StepSeries("frontier/mfu", micro, [each.mfu for each in along]),
    ]


def row(each: Measured, costs: Costs) -> Row:
    plan, interval = each.plan, each.interval
    fitted = each in costs.curve
    return {
        "effective batch": plan.effective_batch,
        "micro x N": f"{plan.micro_batch} x {plan.accum_steps}",
        "samples/s": grouped(each.point.samples_per_sec),
        "median step ms": each.ms,
        "95 % interval": f"{interval.low:.4g}..{interval.high:.4g}" if interval else None,
        "once a step": f"{costs.fit.best.step_share(plan.accum_steps):.0%}" if fitted else None,
        "of matmul peak": f"{each.mfu:.1%}",
        "disturbed": each.point.disturbed,
        "syncs": each.point.sync_calls,
        "steps": len(each.point.steps),
    }


def step_rows(each: Measured) -> Iterator[Row]:
    for number, step in enumerate(each.point.steps, start=1):
        yield step_row(each.plan, number, step)


def step_row(plan: BatchPlan, number: int, step: TimedStep) -> Row:
    return {
        "step": number,
        "effective_batch": plan.effective_batch,
        "micro_batch": plan.micro_batch,
        "accum_steps": plan.accum_steps,
        "loss": step.loss,
        "grad_norm": float(step.result.grad_norm),
        "samples_per_sec": 1000 * step.result.samples / step.wall_ms,
        "wall_ms": step.wall_ms,
        "sync_calls": step.result.sync_calls,
    }


def failures(both: Sequence[Measured]) -> Iterator[str]:
    for each in both:
        applied = sum(step.result.applied for step in each.point.steps)  # a window without targets is skipped
        if each.point.sync_calls != applied:
            yield (
                f"{each.plan.micro_batch} x {each.plan.accum_steps}: gradients synced {each.point.sync_calls} times in "
                f"{applied} steps, not once a step."
            )

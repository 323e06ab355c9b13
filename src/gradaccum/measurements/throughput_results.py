"""The throughput measurement's results: headline, curve, frontier, and the sentences that explain them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gradaccum.engine.batching import BatchPlan
from gradaccum.measurements.costs import Costs, Measured
from gradaccum.measurements.setup import Setup
from gradaccum.measurements.throughput import Config
from gradaccum.measurements.timing import TimedStep
from gradaccum.results.curve import Curve
from gradaccum.results.fits import Percentiles, ends
from gradaccum.results.outcome import Outcome, Row, StepSeries


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
            "frontier": [frontier_row(each, costs, config, setup) for each in costs.frontier],
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
        **ends("flattens_at_effective_batch", flattens_interval(costs)),
        "matmul_peak_gflops": costs.limit.peak_flops_per_sec / 1e9,
        "max_mfu": max(each.mfu for each in both),
        "frontier_fastest_micro_batch": fastest.plan.micro_batch,
        "frontier_slowest_over_fastest": max(each.ms for each in costs.frontier)
        / min(each.ms for each in costs.frontier),
        "disturbed_visits": sum(each.point.disturbed for each in both),
    }


def flattens_interval(costs: Costs) -> Percentiles | None:
    return costs.fit.interval(lambda each: costs.fit.micro_batch * each.flattens_at_accum_steps())


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


def frontier_row(each: Measured, costs: Costs, config: Config, setup: Setup) -> Row:
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
        "samples/s": each.point.samples_per_sec,
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
        "loss": float(step.result.loss),
        "grad_norm": float(step.result.grad_norm),
        "samples_per_sec": 1000 * step.result.samples / step.wall_ms,
        "wall_ms": step.wall_ms,
        "sync_calls": step.result.sync_calls,
    }


def findings(costs: Costs, both: Sequence[Measured], config: Config) -> Iterator[str]:
    yield flattening(costs, config)
    yield step_time(costs)
    yield frontier(costs)
    yield utilization(costs)
    disturbed = sum(each.point.disturbed for each in both)
    visits = sum(len(each.point.visits) for each in both)
    if disturbed:
        yield (
            f"The machine disturbed {disturbed} of {visits} visits (this process had too little of a CPU, or a median "
            "was shifted); they were timed again while seconds allowed."
            + (" That is most of them: measure again on a quieter machine." if disturbed > visits / 2 else "")
        )


def flattening(costs: Costs, config: Config) -> str:
    fit = costs.fit
    steps = fit.best.flattens_at_accum_steps()
    reach = "" if steps <= max(config.accum_steps) else ", beyond the points measured here"
    interval = flattens_interval(costs)
    between = f"; 95 % interval {interval.low:.0f} to {interval.high:.0f}" if interval else ""
    return (
        f"The curve flattens at effective batch {fit.flattens_at} (N={steps}{reach}{between}): from there, samples/s "
        f"are within 5 % of the asymptote, {fit.best.asymptotic_samples_per_sec(fit.micro_batch):.0f}."
    )


def step_time(costs: Costs) -> str:
    best = costs.fit.best
    plans = [each.plan.accum_steps for each in costs.curve]
    shares = ", ".join(f"{best.step_share(steps):.0%} at N={steps}" for steps in sorted(plans))
    missed = costs.fit.extrapolation_error
    seen = "" if missed is None else f", and fitted on the smaller half, it misses the largest by {missed:+.1%}"
    return (
        f"Step time = N x {best.t_micro_ms:.3g} ms + {best.t_step_ms:.3g} ms (residuals to "
        f"{best.max_rel_residual:.1%}{seen}). What is paid once a step, the optimizer above all, is {shares} of it: "
        "that is what a larger N saves, and all of it."
    )


def frontier(costs: Costs) -> str:
    fastest = min(costs.frontier, key=lambda each: each.ms)
    slowest = max(costs.frontier, key=lambda each: each.ms)
    largest = max(costs.frontier, key=lambda each: each.plan.micro_batch)
    beyond = (
        f"; beyond it, micro-batch {largest.plan.micro_batch} takes {largest.ms:.3g} ms" if largest != fastest else ""
    )
    return (
        f"At effective batch {fastest.plan.effective_batch}, micro-batches of {fastest.plan.micro_batch} are fastest, "
        f"{fastest.ms:.3g} ms a step{beyond}; micro-batches of {slowest.plan.micro_batch} take {slowest.ms:.3g} ms, "
        f"{slowest.ms / fastest.ms:.1f} times as long."
    )


def utilization(costs: Costs) -> str:
    peak = costs.limit.peak_flops_per_sec / 1e9
    at_most = max(costs.frontier, key=lambda each: each.mfu)
    curve = max(costs.curve, key=lambda each: each.mfu)
    return (
        f"Large matrix products reach {peak:.0f} GFLOP/s here with these threads. Micro-batches of "
        f"{curve.plan.micro_batch} use {curve.mfu:.1%} of that at N={curve.plan.accum_steps}, those of "
        f"{at_most.plan.micro_batch} {at_most.mfu:.1%}: no larger N closes that gap, only a larger micro-batch can."
    )


def failures(both: Sequence[Measured]) -> Iterator[str]:
    for each in both:
        if each.point.sync_calls != len(each.point.steps):
            yield (
                f"{each.plan.micro_batch} x {each.plan.accum_steps}: gradients synced {each.point.sync_calls} times in "
                f"{len(each.point.steps)} steps, not once a step."
            )

"""The sentences that explain a throughput measurement, and those that say how far to rely on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradaccum.measurements.costs import Costs, Measured
from gradaccum.measurements.points import disturbance
from gradaccum.measurements.throughput import Config
from gradaccum.results.fits import FLAT
from gradaccum.results.sizes import grouped

FEW = 4
"""Fewer points than this leave a line of two numbers next to nothing to miss."""


def findings(costs: Costs, both: Sequence[Measured], config: Config) -> Iterator[str]:
    yield flattening(costs, config)
    yield step_time(costs)
    yield frontier(costs)
    yield utilization(costs)
    yield from doubts(costs, both, config)


def doubts(costs: Costs, both: Sequence[Measured], config: Config) -> Iterator[str]:
    """What speaks against relying on these times."""
    if disturbed := disturbance(each.point for each in both):
        yield disturbed
    if config.repeats > 1 and not all(each.interval for each in both):
        yield (
            f"throughput.seconds={config.seconds:g} left time for one round alone at some points, and one round has no "
            "interval. Raise it."
        )
    if len(costs.curve) < FEW:
        yield (
            f"{len(costs.curve)} points lie on or near any line: set throughput.accum_steps to at least {FEW} to see "
            "whether the model holds."
        )
    misses = [costs.fit.best.max_rel_residual, abs(costs.fit.extrapolation_error or 0.0)]
    if max(misses) > FLAT:
        yield (
            f"The model misses a point by {max(misses):.1%}, more than the {FLAT:.0%} by which flat is told: what is "
            "fitted (the share paid once a step, where it flattens) is rough, whatever its interval, which knows of "
            "noise only. Where noise is the cause, measure longer, or on a quieter machine."
        )
    if any(each.mfu > 1 for each in both):
        yield (
            "Over 100 % of the matrix-product peak: either the machine was disturbed while the peak was measured, or a "
            "kernel needs fewer operations than its definition, by which they are counted (convolutions may)."
        )


def flattening(costs: Costs, config: Config) -> str:
    fit = costs.fit
    steps = fit.best.flattens_at_accum_steps()
    reach = "" if steps <= max(config.accum_steps) else ", beyond the points measured here"
    interval = fit.flattens_interval
    between = f"; 95 % interval {interval.low:.0f} to {interval.high:.0f}" if interval else ""
    return (
        f"By the fit, the curve flattens at effective batch {fit.flattens_at} (N={steps}{reach}{between}): from there, "
        f"its samples/s are within {FLAT:.0%} of its asymptote, "
        f"{grouped(fit.best.asymptotic_samples_per_sec(fit.micro_batch))}."
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
        f"Large matrix products were seen to reach {peak:.0f} GFLOP/s here with these threads, which is less than the "
        f"hardware's nominal peak. Of those {peak:.0f}, micro-batches of "
        f"{curve.plan.micro_batch} use {curve.mfu:.1%} at N={curve.plan.accum_steps}, those of "
        f"{at_most.plan.micro_batch} {at_most.mfu:.1%}: no larger N closes that gap, only a larger micro-batch can."
    )

"""The throughput measurement's computation: two sweeps timed together, and what the machine could do at best."""

from __future__ import annotations

from gradaccum.engine.batching import BatchPlan
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.costs import Costs, Limit, Measured
from gradaccum.measurements.limits import flops_of_micro_batch, matmul_peak_flops_per_sec
from gradaccum.measurements.setup import Progress, Setup
from gradaccum.measurements.throughput import Config
from gradaccum.measurements.throughput_results import outcome
from gradaccum.measurements.timing import Timer, time_points
from gradaccum.results.outcome import Outcome


def sweep(config: Config, setup: Setup, progress: Progress) -> Outcome:
    """See `gradaccum.measurements.throughput.measure`."""
    bench = Bench.prepare(setup)
    curve = [BatchPlan(config.micro_batch * steps, config.micro_batch) for steps in sorted(config.accum_steps)]
    frontier = [BatchPlan(config.frontier.effective_batch, micro) for micro in sorted(config.frontier.micro_batch)]
    steps = dict.fromkeys(frontier, config.frontier.num_steps) | dict.fromkeys(curve, config.num_steps)
    timer = Timer(bench, setup.optimizers.settings(config.optimizer), steps)
    before = matmul_peak_flops_per_sec(bench.device)
    points = time_points(timer, steps, progress, repeats=config.repeats, seconds=config.seconds, seed=setup.seed)
    limit = Limit(
        max(before, matmul_peak_flops_per_sec(bench.device)),
        {micro: flops_of_micro_batch(bench, prepared[0]) for micro, prepared in timer.prepared.items()},
    )
    measured = {each.plan: Measured(each, limit.share(each.plan, each.median_step_ms)) for each in points}
    costs = Costs([measured[plan] for plan in curve], [measured[plan] for plan in frontier], limit)
    return outcome(costs, config, setup)

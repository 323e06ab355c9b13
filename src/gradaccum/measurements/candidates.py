"""The plan's computation: every way to cut the target, with its memory and time predicted."""

from __future__ import annotations

from collections.abc import Callable

from gradaccum.measurements.bench import Bench
from gradaccum.measurements.plan import Config
from gradaccum.measurements.plan_results import Plan, outcome
from gradaccum.measurements.ranking import Candidate, Ranking
from gradaccum.measurements.setup import OptimizerName, Progress, Setup
from gradaccum.measurements.window_memory import Window, gradient_bytes, predict
from gradaccum.results.outcome import Outcome
from gradaccum.results.step_costs import StepCosts


def rank_candidates(config: Config, setup: Setup, progress: Progress, *, costs: StepCosts | None) -> Outcome:
    """See `gradaccum.measurements.plan.measure`."""
    bench = Bench.prepare(setup)
    known = costs if costs and costs.workload == setup.workload.name else None
    optimizer: OptimizerName = (
        "sgd" if known and known.optimizer == "sgd" else "adamw"
    )  # unknown: the one that needs more
    bytes_of = predictor(bench, config, setup, optimizer=optimizer)
    target, ranks = config.target_effective_batch, config.world_size
    candidates = []
    for micro in progress(config.micro_batches(), "plan"):
        steps = target // (micro * ranks)
        peak, inputs = bytes_of(micro, steps)
        time = known.step_ms(micro, steps) if known else None
        candidates.append(Candidate(target, micro, ranks, predicted_bytes=peak, input_bytes=inputs, step_ms=time))
    plan = Plan(Ranking.of(candidates, config.memory_bytes), config, setup.workload.name, optimizer, known)
    return outcome(plan)


def predictor(
    bench: Bench, config: Config, setup: Setup, *, optimizer: OptimizerName
) -> Callable[[int, int], tuple[int, int]]:
    """Memory of a window by its micro-batch and steps, and what of it are inputs.

    It is flat in N from 2 on but for the inputs, so that no more than two micro-batches are gone through. Over several
    ranks one more gradient is added, for the buckets in which it is reduced.
    """
    settings = setup.optimizers.settings(optimizer)
    buckets = gradient_bytes(bench) if config.world_size > 1 else 0

    def predicted_bytes(micro: int, steps: int) -> tuple[int, int]:
        peak = predict(bench, Window(micro, min(steps, 2), settings), device=config.memory_device)
        more_inputs = max(0, steps - 2) * peak.by_kind["inputs"] // 2
        return peak.total + more_inputs + buckets, peak.by_kind["inputs"] + more_inputs

    return predicted_bytes

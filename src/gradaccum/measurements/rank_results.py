"""What the distributed measurement found: points, headline, findings, and which claim does not hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch.distributed as dist

from gradaccum.measurements.distributed import Config, Strategy
from gradaccum.measurements.rank_sweep import Sweep, Taken, Timed
from gradaccum.measurements.spread import Way
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome
from gradaccum.results.sync_fit import SyncTimeFit, fit_sync_time

SAME_BYTES = 0.01
"""Bytes with sync every time may differ by this much from N times those with sync last."""


def outcome_of(sweep: Sweep, config: Config) -> Outcome:
    """The measurement's outcome, with the failures that any rank saw."""
    fits = {strategy: fit_of(sweep, strategy) for strategy in config.strategies}
    return Outcome(
        metrics=headline(sweep, config, fits),
        curve=Curve("distributed", "accum_steps", tuple(points(sweep, config))),
        summary=[row(sweep, timed) for timed in sweep.timed],
        findings=list(findings(sweep, config, fits)),
        failures=of_all_ranks(list(failures(sweep, config))),
    )


def of_all_ranks(failed: Sequence[str]) -> list[str]:
    """Every rank's sentences, each once, with the rank that says it."""
    told: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, list(failed))
    return list(dict.fromkeys(f"rank {rank}: {each}" for rank, sentences in enumerate(told) for each in sentences))


def fit_of(sweep: Sweep, strategy: str) -> SyncTimeFit:
    """Over the points of both ways to sync; keeping parameters gathered has micro-batches of another cost."""
    timed = [each for each in sweep.timed if each.way.strategy == strategy and not each.way.keep_gathered]
    return fit_sync_time(
        [each.plan.accum_steps for each in timed],
        [per_window(each, "sync_calls") for each in timed],
        [median(each.wall_ms) for each in timed],
    )


def per_window(timed: Timed, count: str) -> int:
    """What a window counted; the same in every window once DDP has found its buckets."""
    return int(getattr(timed.steps[-1], count))


def at(sweep: Sweep, way: Way, accum_steps: int) -> Timed:
    return next(each for each in sweep.timed if (each.way, each.plan.accum_steps) == (way, accum_steps))


def headline(sweep: Sweep, config: Config, fits: Mapping[Strategy, SyncTimeFit]) -> dict[str, Any]:
    taken = [*sweep.even.values(), *sweep.uneven]
    metrics: dict[str, Any] = {
        "max_grad_diff": max(each.single.max_grad_diff for each in taken),
        "max_param_diff": max(each.single.max_param_diff for each in taken),
        "max_grad_rel_diff_float64": max(each.sharp.grad_rel_diff for each in taken),
        "optimizer_steps_per_window": max((each.optimizer_steps for each in taken), key=lambda steps: abs(steps - 1)),
        "mean_of_rank_means_rejected": not sweep.control.verdict.equivalent,
        "equivalent": all(each.verdict.equivalent for each in taken),
    }
    most = max(config.accum_steps)
    for strategy in config.strategies:
        last, every = (at(sweep, Way(strategy, sync), most) for sync in ("last", "every"))
        metrics |= {
            f"{strategy}/reductions_last": per_window(last, "reductions"),
            f"{strategy}/reductions_every": per_window(every, "reductions"),
            f"{strategy}/reduced_bytes_ratio": per_window(every, "reduced_bytes") / per_window(last, "reduced_bytes"),
            f"{strategy}/step_time_ratio": median(every.wall_ms) / median(last.wall_ms),
            f"{strategy}/t_micro_ms": fits[strategy].t_micro_ms,
            f"{strategy}/t_sync_ms": fits[strategy].t_sync_ms,
            f"{strategy}/t_step_ms": fits[strategy].t_step_ms,
        }
    return metrics


def points(sweep: Sweep, config: Config) -> Iterator[dict[str, Any]]:
    for timed in sweep.timed:
        plan = timed.plan
        yield {
            "series": timed.way.name,
            "effective_batch": plan.effective_batch,
            "accum_steps": plan.accum_steps,
            "micro_batch": plan.micro_batch,
            "world_size": plan.world_size,
            **differences(sweep.even[timed.way, plan.accum_steps]),
            "reductions": per_window(timed, "reductions"),
            "reduced_bytes": per_window(timed, "reduced_bytes"),
            "gathered_bytes": per_window(timed, "gathered_bytes"),
            "sync_calls": sum(step.sync_calls for step in timed.steps),
            "median_step_ms": median(timed.wall_ms),
            "samples_per_sec": 1000 * sum(step.samples for step in timed.steps) / math.fsum(timed.wall_ms),
            "avg_loss": fmean(float(step.loss) for step in timed.steps),
            "steps": len(timed.steps),
        }
    for taken in [*sweep.uneven, sweep.control]:
        yield {
            "series": taken.name if taken is sweep.control else f"{taken.name}/uneven",
            "effective_batch": sum(map(sum, taken.share)),
            "accum_steps": max(map(len, taken.share)),
            "micro_batch": None,
            "world_size": config.world_size,
            "cut": [list(sizes) for sizes in taken.share],
            **differences(taken),
        }


def differences(taken: Taken) -> dict[str, Any]:
    return {
        "max_grad_diff": taken.single.max_grad_diff,
        "max_param_diff": taken.single.max_param_diff,
        "grad_rel_diff": taken.single.grad_rel_diff,
        "grad_rel_diff_float64": taken.sharp.grad_rel_diff,
        "param_rel_diff_float64": taken.sharp.param_rel_diff,
        "loss_rel_diff_float64": taken.sharp.loss_rel_diff,
        "optimizer_steps": taken.optimizer_steps,
        "equivalent": taken.verdict.equivalent,
    }


def row(sweep: Sweep, timed: Timed) -> dict[str, Any]:
    taken = sweep.even[timed.way, timed.plan.accum_steps]
    return {
        "way": timed.way.name,
        "micro x N x W": f"{timed.plan.micro_batch} x {timed.plan.accum_steps} x {timed.plan.world_size}",
        "syncs": per_window(timed, "sync_calls"),
        "reductions": per_window(timed, "reductions"),
        "reduced kB": per_window(timed, "reduced_bytes") / 1000,
        "gathered kB": per_window(timed, "gathered_bytes") / 1000,
        "median step ms": median(timed.wall_ms),
        "max grad diff": taken.single.max_grad_diff,
        "float64 grad rel": taken.sharp.grad_rel_diff,
        "verdict": "equivalent" if taken.verdict.equivalent else "rejected",
    }


def findings(sweep: Sweep, config: Config, fits: Mapping[Strategy, SyncTimeFit]) -> Iterator[str]:
    most = max(config.accum_steps)
    for strategy in config.strategies:
        last, every = (at(sweep, Way(strategy, sync), most) for sync in ("last", "every"))
        fit = fits[strategy]
        yield (
            f"{strategy}, N={most}: syncing on the last micro-batch only takes {per_window(last, 'reductions')} "
            f"instead of {per_window(every, 'reductions')} reductions a window, for "
            f"{per_window(last, 'reduced_bytes') / 1000:.4g} instead of "
            f"{per_window(every, 'reduced_bytes') / 1000:.4g} kB of gradients, and a step "
            f"{median(last.wall_ms):.3g} instead of {median(every.wall_ms):.3g} ms."
        )
        yield (
            f"{strategy}: step time = N x {fit.t_micro_ms:.3g} ms + syncs x {fit.t_sync_ms:.3g} ms + "
            f"{fit.t_step_ms:.3g} ms (residuals to {fit.max_rel_residual:.0%})."
        )
    if not sweep.control.verdict.equivalent:
        yield (
            "Control mean_of_rank_means (each rank divides by its own targets) is rejected, as it must be: "
            f"{sweep.control.verdict.problems[0]}."
        )


def failures(sweep: Sweep, config: Config) -> Iterator[str]:
    for name, taken in [
        *((f"{way.name}, N={steps}", each) for (way, steps), each in sweep.even.items()),
        *((f"{each.name}, unevenly shared", each) for each in sweep.uneven),
    ]:
        for problem in taken.verdict.problems:
            yield f"{name}: {problem}."
        if taken.optimizer_steps != 1:
            yield f"{name}: the optimizer stepped {taken.optimizer_steps} times in one window on some rank, not once."
    if sweep.control.verdict.equivalent:
        yield "The comparison is blind: the control mean_of_rank_means, a known mistake, passed."
    for strategy in config.strategies:
        for accum_steps in config.accum_steps:
            last, every = (at(sweep, Way(strategy, sync), accum_steps) for sync in ("last", "every"))
            yield from miscounts(last, every, f"{strategy}, N={accum_steps}")


def miscounts(last: Timed, every: Timed, name: str) -> Iterator[str]:
    """Syncing every time takes N times the reductions and gradient bytes of syncing last."""
    steps = last.plan.accum_steps
    once, each_time = per_window(last, "reductions"), per_window(every, "reductions")
    if each_time != steps * once or not once:
        yield f"{name}: {once} reductions a window with sync='last' and {each_time} with 'every', not {steps} times."
    ratio = per_window(every, "reduced_bytes") / per_window(last, "reduced_bytes") if once else 0.0
    if not abs(ratio / steps - 1) <= SAME_BYTES:
        yield f"{name}: sync='every' reduced {ratio:.3f} times the bytes of sync='last', not {steps} times."
    for timed, expected in ((last, 1), (every, steps)):
        if any(step.sync_calls != expected for step in timed.steps):
            yield f"{name}: some window of sync={timed.way.sync!r} ran another number of syncs than {expected}."

"""What the distributed measurement found: points, headline, findings, and which claim does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from gradaccum.measurements.distributed import Config, Strategy
from gradaccum.measurements.points import disturbance
from gradaccum.measurements.rank_fit import PARTS, Fitted
from gradaccum.measurements.rank_sweep import Sweep, Taken
from gradaccum.measurements.rank_timing import Timed
from gradaccum.measurements.spread import Way
from gradaccum.results.curve import Curve
from gradaccum.results.intervals import Interval, ends, geometric_interval
from gradaccum.results.outcome import Outcome

SAME_BYTES = 0.01
"""Bytes with sync every time may differ by this much from N times those with sync last."""


def outcome_of(sweep: Sweep, config: Config) -> Outcome:
    """The measurement's outcome, with the failures that any rank saw."""
    fits = {strategy: Fitted.of(sweep, strategy) for strategy in config.strategies}
    return Outcome(
        metrics=headline(sweep, config, fits),
        curve=Curve("distributed", "accum_steps", tuple(points(sweep, config, fits))),
        summary=[row(sweep, timed) for timed in sweep.timed],
        findings=list(findings(sweep, config, fits)),
        failures=of_all_ranks(list(failures(sweep, config))),
    )


def of_all_ranks(failed: Sequence[str]) -> list[str]:
    """Every rank's sentences, each once, with the rank that says it."""
    told: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, list(failed))
    return list(dict.fromkeys(f"rank {rank}: {each}" for rank, sentences in enumerate(told) for each in sentences))


def at(sweep: Sweep, way: Way, accum_steps: int) -> Timed:
    return next(each for each in sweep.timed if (each.way, each.plan.accum_steps) == (way, accum_steps))


def headline(sweep: Sweep, config: Config, fits: Mapping[Strategy, Fitted]) -> dict[str, Any]:
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
            f"{strategy}/reductions_last": last.per_window("reductions"),
            f"{strategy}/reductions_every": every.per_window("reductions"),
            f"{strategy}/reduced_bytes_ratio": every.per_window("reduced_bytes") / last.per_window("reduced_bytes"),
            f"{strategy}/step_time_ratio": every.ms / last.ms,
            **ends(f"{strategy}/step_time_ratio", ratio_interval(every, last)),
            **{f"{strategy}/{key}": value for name in PARTS for key, value in fits[strategy].part(name).items()},
            f"{strategy}/max_rel_residual": fits[strategy].best.max_rel_residual,
        }
    return metrics | {"disturbed_visits": sum(each.point.disturbed for each in sweep.timed)}


def ratio_interval(over: Timed, under: Timed) -> Interval | None:
    """Round by round: what slows the machine in one slows both."""
    rounds = zip(over.point.round_medians_ms, under.point.round_medians_ms, strict=False)
    ratios = [numerator / denominator for numerator, denominator in rounds]
    return geometric_interval(ratios) if len(ratios) > 1 else None


def points(sweep: Sweep, config: Config, fits: Mapping[Strategy, Fitted]) -> Iterator[dict[str, Any]]:
    for timed in sweep.timed:
        plan = timed.plan
        yield {
            "series": timed.way.name,
            "effective_batch": plan.effective_batch,
            "accum_steps": plan.accum_steps,
            "micro_batch": plan.micro_batch,
            "world_size": plan.world_size,
            **differences(sweep.even[timed.way, plan.accum_steps]),
            **counts(timed),
            **times(timed, fits[timed.way.strategy]),
            "avg_loss": timed.point.avg_loss,
            "steps": len(timed.point.steps),
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


def counts(timed: Timed) -> dict[str, Any]:
    """Of a window, and syncs of all steps."""
    of_a_window = {name: timed.per_window(name) for name in ("reductions", "reduced_bytes", "gathered_bytes")}
    return {**of_a_window, "sync_calls": timed.point.sync_calls}


def times(timed: Timed, fitted: Fitted) -> dict[str, Any]:
    modelled = not timed.way.keep_gathered
    return {
        "median_step_ms": timed.ms,
        **ends("step_ms", timed.interval),
        "fitted_step_ms": fitted.best.step_ms(timed.plan.accum_steps, timed.per_window("sync_calls"))
        if modelled
        else None,
        "samples_per_sec": timed.point.samples_per_sec,
        "round_spread": timed.point.round_spread,
        "rounds": len(timed.point.visits),
        "disturbed_visits": timed.point.disturbed,
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
        "N": timed.plan.accum_steps,
        "syncs": timed.per_window("sync_calls"),
        "reductions": timed.per_window("reductions"),
        "reduced kB": timed.per_window("reduced_bytes") / 1000,
        "gathered kB": timed.per_window("gathered_bytes") / 1000,
        "median step ms": timed.ms,
        "95 % interval": f"{timed.interval.low:.3g}..{timed.interval.high:.3g}" if timed.interval else None,
        "max grad diff": taken.single.max_grad_diff,
        "float64 grad rel": taken.sharp.grad_rel_diff,
        "verdict": "equivalent" if taken.verdict.equivalent else "rejected",
    }


def findings(sweep: Sweep, config: Config, fits: Mapping[Strategy, Fitted]) -> Iterator[str]:
    most = max(config.accum_steps)
    for strategy in config.strategies:
        last, every = (at(sweep, Way(strategy, sync), most) for sync in ("last", "every"))
        interval = ratio_interval(every, last)
        yield (
            f"{strategy}, N={most}: syncing on the last micro-batch only takes {last.per_window('reductions')} "
            f"instead of {every.per_window('reductions')} reductions a window, for "
            f"{last.per_window('reduced_bytes') / 1000:.4g} instead of "
            f"{every.per_window('reduced_bytes') / 1000:.4g} kB of gradients; syncing every time takes "
            f"{every.ms / last.ms:.2g} times as long"
            + (f" (95 % interval {interval.low:.2g} to {interval.high:.2g})." if interval else ".")
        )
        yield f"{strategy}: {fits[strategy].sentence()}"
    if disturbed := disturbance(each.point for each in sweep.timed):
        yield disturbed
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
    once, each_time = last.per_window("reductions"), every.per_window("reductions")
    if each_time != steps * once or not once:
        yield f"{name}: {once} reductions a window with sync='last' and {each_time} with 'every', not {steps} times."
    ratio = every.per_window("reduced_bytes") / last.per_window("reduced_bytes") if once else 0.0
    if not abs(ratio / steps - 1) <= SAME_BYTES:
        yield f"{name}: sync='every' reduced {ratio:.3f} times the bytes of sync='last', not {steps} times."
    for timed, expected in ((last, 1), (every, steps)):
        if any(step.result.sync_calls != expected for step in timed.point.steps):
            yield f"{name}: some window of sync={timed.way.sync!r} ran another number of syncs than {expected}."

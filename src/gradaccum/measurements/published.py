"""The scaling measurement's computation: two published rules, each with and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradaccum.engine.batching import BatchPlan
from gradaccum.measurements.arms import ArmResult, ended, excess, fields, is_worse, point, train_arms
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.rules import scaled_beta2, scaled_lr
from gradaccum.measurements.scaling import Config, Grid, HalfLife, LinearScaling
from gradaccum.measurements.setup import SGD, AdamW, Progress, Setup
from gradaccum.measurements.training import Arm
from gradaccum.results import sentences
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome

PAPERS_RULE = {"linear": "warm_up", "half_life": "half_life"}
"""Of each trial, the name of the arms that do as the paper says."""


def repeat_published(config: Config, setup: Setup, progress: Progress) -> Outcome:
    """See `gradaccum.measurements.scaling.measure`."""
    bench = Bench.prepare(setup)
    linear = Trial.run(bench, linear_arms(config.linear, setup.optimizers.sgd), config, config.linear, progress)
    half_life = Trial.run(
        bench, half_life_arms(config.half_life, setup.optimizers.adamw), config, config.half_life, progress
    )
    metrics = {**linear_metrics(linear), **half_life_metrics(half_life), "seeds": len(config.seeds)}
    trials = {"linear": linear, "half_life": half_life}
    return Outcome(
        metrics=metrics,
        curve=Curve(
            "scaling", "effective_batch", tuple(p for name, trial in trials.items() for p in points(name, trial))
        ),
        summary=[row(name, each) for name, trial in trials.items() for each in (trial.base, *trial.results)],
        findings=[sentences.linear_scaling(metrics), sentences.half_life(metrics)],
    )


@dataclass(frozen=True)
class Trial:
    """Arms with a rule and without it, and the arm that both depart from."""

    results: tuple[ArmResult, ...]
    base: ArmResult

    @classmethod
    def run(cls, bench: Bench, arms: Sequence[Arm], config: Config, grid: Grid, progress: Progress) -> Trial:
        """The first arm is the base."""
        arms = [replace(arm, decay=config.decay) for arm in arms]
        results = train_arms(bench, arms, seeds=config.seeds, samples=grid.samples, progress=progress)
        return cls(tuple(results[1:]), results[0])

    def times(self, result: ArmResult) -> float:
        return result.effective_batch / self.base.effective_batch

    def named(self, name: str) -> list[ArmResult]:
        """The arms of that name, nearest to the base first."""
        return [each for each in self.results if each.arm.name == name]


def linear_arms(grid: LinearScaling, settings: SGD) -> list[Arm]:
    """The smallest arm; each larger one at its learning rate, at the scaled one, and at that after a warm-up."""
    plans = [BatchPlan(grid.micro_batch * steps, grid.micro_batch) for steps in sorted(grid.accum_steps)]
    arms = [Arm("base", plans[0], replace(settings, lr=grid.base_lr))]
    for plan in plans[1:]:
        times = plan.effective_batch / plans[0].effective_batch
        abrupt = Arm("no_warm_up", plan, replace(settings, lr=scaled_lr(grid.base_lr, times, "linear")))
        over = grid.warmup_fraction * grid.samples
        arms += [
            Arm("unscaled", plan, arms[0].settings),
            abrupt,
            replace(abrupt, name="warm_up", warmup_samples=over, warmup_start=1 / times),
        ]
    return arms


def half_life_arms(grid: HalfLife, settings: AdamW) -> list[Arm]:
    """The largest arm as set; each smaller one with its second beta, and with its half-life.

    The learning rate follows the square root of the effective batch in both.
    """
    plans = [BatchPlan(grid.micro_batch * steps, grid.micro_batch) for steps in sorted(grid.accum_steps, reverse=True)]
    arms: list[Arm] = []
    for plan in plans:
        times = plan.effective_batch / plans[0].effective_batch
        for rule in ("fixed", "half_life") if arms else ("fixed",):
            betas = (settings.betas[0], scaled_beta2(grid.base_beta2, times, rule))
            lr = scaled_lr(grid.base_lr, times, "sqrt")
            arms.append(Arm(rule if arms else "base", plan, replace(settings, lr=lr, betas=betas)))
    return arms


def linear_metrics(trial: Trial) -> dict[str, Any]:
    """Up to how many times the base's effective batch the result stays, with each way to set the learning rate."""
    others = ("unscaled", "no_warm_up")
    reach = {name: holds_up_to(trial, name) for name in (*others, "warm_up")}
    return {
        "linear/base_effective_batch": trial.base.effective_batch,
        "linear/base_failed_runs": trial.base.failed_runs,
        "linear/largest_times": trial.times(trial.named("warm_up")[-1]),
        **{f"linear/{name}/holds_up_to_times": times for name, times in reach.items()},
        "linear/holds": not trial.base.failed_runs and all(reach["warm_up"] > reach[name] for name in others),
    }


def holds_up_to(trial: Trial, name: str) -> float:
    """The largest multiple of the base's effective batch up to which no arm is worse than the base."""
    reach = 1.0
    for each in trial.named(name):
        if is_worse(each, trial.base):
            break
        reach = trial.times(each)
    return reach


def half_life_metrics(trial: Trial) -> dict[str, Any]:
    """At the smallest arm; the claim holds if it is no worse than the base, and better than with a fixed beta."""
    kept, fixed = trial.named("half_life")[-1], trial.named("fixed")[-1]
    return {
        "half_life/base_effective_batch": trial.base.effective_batch,
        "half_life/effective_batch": kept.effective_batch,
        **fields(excess(kept, trial.base), "half_life/loss_above_base"),
        **fields(excess(fixed, kept), "half_life/loss_of_fixed_above_it"),
        "half_life/base_failed_runs": trial.base.failed_runs,
        "half_life/kept_failed_runs": kept.failed_runs,
        "half_life/fixed_failed_runs": fixed.failed_runs,
        "half_life/kept_is_worse": is_worse(kept, trial.base),
        "half_life/fixed_is_worse": is_worse(fixed, kept),
        "half_life/holds": not trial.base.failed_runs and not is_worse(kept, trial.base) and is_worse(fixed, kept),
    }


def points(trial_name: str, trial: Trial) -> Iterator[dict[str, Any]]:
    """Each rule's line begins at the base; what an arm is judged by are its differences, seed by seed."""
    follows = {each.effective_batch: each for each in trial.named(PAPERS_RULE[trial_name])}
    for name in dict.fromkeys(each.arm.name for each in trial.results):
        for each in [trial.base, *trial.named(name)]:
            more = None if each is trial.base else excess(each, trial.base)
            rule = follows.get(each.effective_batch, each)
            yield {
                **point(each, f"{trial_name}/{name}"),
                "departs_from": trial.base.effective_batch,
                **fields(more, "loss_above_base"),
                **fields(None if rule is each else excess(each, rule), "loss_above_rule"),
            }


def row(trial_name: str, result: ArmResult) -> dict[str, Any]:
    loss, settings = ended(result), result.arm.settings
    return {
        "rule": f"{trial_name}/{result.arm.name}",
        "effective batch": result.effective_batch,
        "lr": settings.lr,
        "beta2": settings.betas[1] if isinstance(settings, AdamW) else None,
        "validation loss": f"{loss.mean:.4g} ({loss.low:.3g} to {loss.high:.3g})" if loss else None,
        "failed runs": result.failed_runs,
    }

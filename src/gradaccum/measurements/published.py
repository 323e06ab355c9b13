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
from gradaccum.results.sentences import RULE


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

    The learning rate follows the square root of the effective batch in both. The largest arm is tried at twice its rate
    as well: one that twice the rate serves better is no match for a smaller batch, whose steps are more.
    """
    plans = [BatchPlan(grid.micro_batch * steps, grid.micro_batch) for steps in sorted(grid.accum_steps, reverse=True)]
    arms: list[Arm] = []
    for plan in plans:
        times = plan.effective_batch / plans[0].effective_batch
        for rule in ("fixed", "half_life") if arms else ("fixed",):
            betas = (settings.betas[0], scaled_beta2(grid.base_beta2, times, rule))
            lr = scaled_lr(grid.base_lr, times, "sqrt")
            arms.append(Arm(rule if arms else "base", plan, replace(settings, lr=lr, betas=betas)))
    base = arms[0].settings
    arms.insert(1, replace(arms[0], name="twice_lr", settings=replace(base, lr=2 * base.lr)))
    return arms


def linear_metrics(trial: Trial) -> dict[str, Any]:
    """At the largest arm: scaled with warm-up beside the base, and each other way beside that."""
    unscaled, abrupt, warm = (trial.named(name)[-1] for name in ("unscaled", "no_warm_up", "warm_up"))
    return {
        **base_metrics(trial, "linear"),
        "linear/effective_batch": warm.effective_batch,
        "linear/times": trial.times(warm),
        **against("linear/warm_up", warm, trial.base),
        **against("linear/no_warm_up", abrupt, warm),
        **against("linear/unscaled", unscaled, warm),
    }


def half_life_metrics(trial: Trial) -> dict[str, Any]:
    """At the smallest arm: with the half-life kept beside the base, and with a fixed beta beside that."""
    kept, fixed = trial.named("half_life")[-1], trial.named("fixed")[-1]
    return {
        **base_metrics(trial, "half_life"),
        "half_life/effective_batch": kept.effective_batch,
        **against("half_life/twice_lr", trial.named("twice_lr")[0], trial.base),
        **against("half_life/kept", kept, trial.base),
        **against("half_life/fixed", fixed, kept),
    }


def base_metrics(trial: Trial, name: str) -> dict[str, Any]:
    loss = ended(trial.base)
    return {
        f"{name}/base_effective_batch": trial.base.effective_batch,
        f"{name}/base_failed_runs": trial.base.failed_runs,
        f"{name}/base_validation_loss": loss.mean if loss else None,
    }


def against(name: str, one: ArmResult, other: ArmResult) -> dict[str, Any]:
    """What decides between two arms: the difference seed by seed, never whether each passes a threshold of its own."""
    return {
        **fields(excess(one, other), f"{name}_loss_above"),
        f"{name}_failed_runs": one.failed_runs,
        f"{name}_is_worse": is_worse(one, other),
    }


def points(trial_name: str, trial: Trial) -> Iterator[dict[str, Any]]:
    """Each rule's line begins at the base; what an arm is judged by are its differences, seed by seed.

    Other arms at the base's own effective batch only probe the base, and have no line.
    """
    follows = {each.effective_batch: each for each in trial.named(RULE[trial_name])}
    follow = [each for each in trial.results if each.effective_batch != trial.base.effective_batch]
    for name in dict.fromkeys(each.arm.name for each in follow):
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

"""The efficiency measurement's computation: all arms on equal samples, and from where larger costs quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gradaccum.engine.batching import BatchPlan
from gradaccum.measurements.arms import ArmResult, best_of, excess, is_worse, train_arms
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.efficiency import Config
from gradaccum.measurements.rules import scaled_beta2, scaled_lr
from gradaccum.measurements.setup import AdamW, Progress, Setup
from gradaccum.measurements.training import Arm
from gradaccum.results.intervals import Interval


def compare_arms(config: Config, setup: Setup, progress: Progress) -> Comparison:
    """Train every arm with every seed."""
    arms = [make_arm(config, setup, steps) for steps in sorted(config.accum_steps)]
    bench = Bench.prepare(setup)
    return Comparison(tuple(train_arms(bench, arms, seeds=config.seeds, samples=config.samples, progress=progress)))


def make_arm(config: Config, setup: Setup, accum_steps: int) -> Arm:
    """An arm whose settings follow the section's rules."""
    plan = BatchPlan(config.micro_batch * accum_steps, config.micro_batch)
    times = plan.effective_batch / config.base_effective_batch
    settings = replace(setup.optimizers.settings(config.optimizer), lr=scaled_lr(config.base_lr, times, config.scaling))
    if isinstance(settings, AdamW):
        first, second = settings.betas
        settings = replace(settings, betas=(first, scaled_beta2(second, times, config.beta2_rule)))
    return Arm(
        config.optimizer,
        plan,
        settings,
        warmup_samples=config.warmup_fraction * config.samples,
        warmup_start=min(1.0, config.base_lr / settings.lr),
        decay=config.decay,
    )


@dataclass(frozen=True)
class Comparison:
    """All arms, from the smallest effective batch to the largest."""

    results: tuple[ArmResult, ...]

    @cached_property
    def best(self) -> ArmResult | None:
        """The least validation loss at the end; None where every arm failed."""
        return best_of(self.results)

    @cached_property
    def worse_from(self) -> int | None:
        """The smallest effective batch, beyond the best one, whose loss exceeds the best by more than the interval."""
        if self.best is None:
            return self.results[0].effective_batch
        beyond = [each for each in self.results if each.effective_batch > self.best.effective_batch]
        return next((each.effective_batch for each in beyond if is_worse(each, self.best)), None)

    @property
    def worse(self) -> ArmResult | None:
        """That arm. Where its runs failed the learning rate was too large, whatever the noise."""
        return next((each for each in self.results if each.effective_batch == self.worse_from), None)

    def above_best(self, result: ArmResult | None) -> Interval | None:
        """How much more loss an arm ends with than the best one, seed by seed."""
        return None if result is None or self.best is None or result is self.best else excess(result, self.best)

    @cached_property
    def worth_it(self) -> ArmResult | None:
        """The last arm before quality suffers."""
        before = [each for each in self.results if self.worse_from is None or each.effective_batch < self.worse_from]
        return before[-1] if before else None

    @cached_property
    def noisy(self) -> ArmResult | None:
        """Whose noise scale is told: the arm `worth_it`, or the first larger one whose windows show it."""
        least = self.worth_it.effective_batch if self.worth_it else 0
        return next((each for each in self.results if each.effective_batch >= least and each.noise), None)

    @cached_property
    def target_loss(self) -> float | None:
        """What every run reaches of the arms that are not worse than the best."""
        return _reached_by([each for each in self.results if self.best and not is_worse(each, self.best)])

    @cached_property
    def common_target_loss(self) -> float | None:
        """What every run reaches of the arms that did not fail."""
        return _reached_by([each for each in self.results if not each.failed_runs])

    def samples_to(self, loss: float | None, result: ArmResult) -> Interval | None:
        """None where some seed of the arm does not get there, or failed."""
        return None if loss is None or result.failed_runs else result.samples_to(loss)


def _reached_by(results: Sequence[ArmResult]) -> float | None:
    finals = [run.final.validation_loss for each in results for run in each.runs]
    return max((loss for loss in finals if loss is not None), default=None)

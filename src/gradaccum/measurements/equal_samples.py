"""The efficiency measurement's computation: all arms on equal samples, and from where larger costs quality."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from gradaccum.engine.batching import BatchPlan
from gradaccum.engine.noise_scale import NoiseScaleEstimate
from gradaccum.measurements.arms import ArmResult, best_of, ended, is_worse, train_arms
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.efficiency import Config
from gradaccum.measurements.rules import scaled_beta2, scaled_lr
from gradaccum.measurements.setup import AdamW, Progress, Setup
from gradaccum.measurements.training import Arm
from gradaccum.results.intervals import first_reached


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
    def worse_from_failed_runs(self) -> int | None:
        """How many of its runs failed: then the learning rate was too large there, whatever the noise."""
        return next((each.failed_runs for each in self.results if each.effective_batch == self.worse_from), None)

    @cached_property
    def worth_it(self) -> ArmResult | None:
        """The last arm before quality suffers."""
        before = [each for each in self.results if self.worse_from is None or each.effective_batch < self.worse_from]
        return before[-1] if before else None

    @cached_property
    def noise(self) -> NoiseScaleEstimate | None:
        """Over the whole run of the arm `worth_it`, or of the first larger one that has two micro-batches a window."""
        least = self.worth_it.effective_batch if self.worth_it else 0
        return next((each.noise for each in self.results if each.effective_batch >= least and each.noise), None)

    @cached_property
    def target_loss(self) -> float | None:
        """What the best arm ends with, up to its interval."""
        interval = ended(self.best) if self.best else None
        return interval.high if interval else None

    def samples_to_target(self, result: ArmResult) -> float | None:
        """After how many samples the mean validation loss is down to the target; None where it never is."""
        if self.target_loss is None:
            return None
        losses = [stand.validation_loss.mean if stand.validation_loss else None for stand in result.learning]
        return first_reached([stand.samples for stand in result.learning], losses, self.target_loss)

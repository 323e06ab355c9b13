"""The efficiency measurement's computation: all arms on equal samples, and from where larger costs quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

from gradaccum.engine.batching import BatchPlan
from gradaccum.measurements.arms import ArmResult, excess, is_worse, train_arms
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
    def reference(self) -> ArmResult | None:
        """The smallest arm, of those that did not fail: chosen beforehand, for the best of many arms was lucky too."""
        return next((each for each in self.results if not each.failed_runs), None)

    @cached_property
    def worse_from(self) -> int | None:
        """The smallest effective batch from which on every arm ends worse than the reference, or where a seed failed.

        Arms are tested from the largest down, up to the first that is not worse: each test is made only where all
        before it told, so that however many arms there are, one in forty sweeps of equal ones is told apart.
        Source: Hsu and Berger 1999, Stepwise Confidence Intervals without Multiplicity Adjustment for Dose-Response and
        Toxicity Studies, Journal of the American Statistical Association 94:446.
        """
        reference = self.reference
        if reference is None:
            return self.results[0].effective_batch
        beyond = [each for each in self.results if each.effective_batch > reference.effective_batch]
        worse = takewhile(lambda each: is_worse(each, reference), reversed(beyond))
        failed = (each for each in beyond if each.failed_runs)
        return min((each.effective_batch for each in (*worse, *failed)), default=None)

    @property
    def worse(self) -> ArmResult | None:
        """That arm. Where its runs failed the learning rate was too large, whatever the noise."""
        return next((each for each in self.results if each.effective_batch == self.worse_from), None)

    def above_reference(self, result: ArmResult | None) -> Interval | None:
        """How much more loss an arm ends with than the reference, seed by seed."""
        reference = self.reference
        return None if result is None or reference is None or result is reference else excess(result, reference)

    @property
    def good(self) -> list[ArmResult]:
        """The arms before quality suffers."""
        return [each for each in self.results if self.worse_from is None or each.effective_batch < self.worse_from]

    @cached_property
    def worth_it(self) -> ArmResult | None:
        """The last of them."""
        return self.good[-1] if self.good else None

    @cached_property
    def noisy(self) -> ArmResult | None:
        """Whose noise scale is told: the arm `worth_it`, or the first larger one whose windows show it."""
        least = self.worth_it.effective_batch if self.worth_it else 0
        return next((each for each in self.results if each.effective_batch >= least and each.noise), None)

    @cached_property
    def target_loss(self) -> float | None:
        """What every run reaches of the arms that cost no quality."""
        return _reached_by([each for each in self.good if not each.failed_runs])

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

"""What the arms show: metrics, curve, tables and findings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradaccum.engine.noise_scale import NoiseScaleEstimate
from gradaccum.measurements.arms import ArmResult, ended, excess, fields, noise_fields, point
from gradaccum.measurements.equal_samples import Comparison
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome, StepSeries


def outcome_of(comparison: Comparison) -> Outcome:
    results = comparison.results
    return Outcome(
        metrics=headline(comparison),
        curve=Curve("efficiency", "effective_batch", tuple(arm_point(each, comparison) for each in results)),
        summary=[row(each, comparison) for each in results],
        findings=list(findings(comparison)),
        tables={"learning": [line for each in results for line in learning(each)]},
        series=[line for each in results for line in step_series(each)],
    )


def headline(comparison: Comparison) -> dict[str, Any]:
    best, worth_it = comparison.best, comparison.worth_it
    return {
        "best_effective_batch": best.effective_batch if best else None,
        **fields(ended(best) if best else None, "best_validation_loss"),
        "worth_it_up_to_effective_batch": worth_it.effective_batch if worth_it else None,
        "worse_from_effective_batch": comparison.worse_from,
        "worse_from_failed_runs": comparison.worse_from_failed_runs,
        "target_loss": comparison.target_loss,
        **noise_fields(comparison.noise),
        "failed_runs": sum(each.failed_runs for each in comparison.results),
    }


def arm_point(result: ArmResult, comparison: Comparison) -> dict[str, Any]:
    more = excess(result, comparison.best) if comparison.best and result is not comparison.best else None
    return {
        **point(result, result.arm.name),
        **fields(more, "loss_above_best"),
        **noise_fields(result.noise),
        "samples_to_target": comparison.samples_to_target(result),
    }


def learning(result: ArmResult) -> Iterator[dict[str, Any]]:
    """One row an evaluation: the learning curve, against samples and against optimizer steps."""
    for stand in result.learning:
        yield {
            "series": result.arm.name,
            "effective_batch": result.effective_batch,
            "samples": stand.samples,
            "steps": stand.steps,
            **fields(stand.validation_loss, "validation_loss"),
            **fields(stand.validation_accuracy, "validation_accuracy"),
            "train_loss": stand.train_loss.mean if stand.train_loss else None,
            **noise_fields(stand.noise),
        }


def step_series(result: ArmResult) -> Iterator[StepSeries]:
    """The same for the tracker, where the curves of all arms overlay against samples."""
    rows = list(learning(result))
    samples, steps = ([line[axis] for line in rows] for axis in ("samples", "steps"))
    for name in ("validation_loss", "validation_accuracy", "train_loss", "noise_scale"):
        known = [(at, line[name]) for at, line in zip(samples, rows, strict=True) if line[name] is not None]
        if known:
            at, values = zip(*known, strict=True)
            yield StepSeries(f"{result.arm.name}/{name}_by_samples/b{result.effective_batch}", at, values)
    losses = [line["validation_loss"] for line in rows]
    yield StepSeries(f"{result.arm.name}/validation_loss_by_steps/b{result.effective_batch}", steps, losses)


def row(result: ArmResult, comparison: Comparison) -> dict[str, Any]:
    loss, noise = ended(result), result.noise
    at = result.learning[-1]
    return {
        "effective batch": result.effective_batch,
        "steps": at.steps,
        "lr": result.arm.settings.lr,
        "validation loss": f"{loss.mean:.4g} ({loss.low:.3g} to {loss.high:.3g})" if loss else "-",
        "accuracy": at.validation_accuracy.mean if at.validation_accuracy else None,
        "failed runs": result.failed_runs,
        "noise scale": shown(noise) if noise else None,
        "samples to target": comparison.samples_to_target(result),
    }


def findings(comparison: Comparison) -> Iterator[str]:
    best, worth_it, noise = comparison.best, comparison.worth_it, comparison.noise
    if best is None or worth_it is None:
        yield "Every arm failed with some seed: diverged, or ended worse than it began. Lower base_lr."
        return
    loss = ended(best)
    assert loss is not None
    yield (
        f"Best on equal samples: effective batch {best.effective_batch}, validation loss {loss.mean:.4g} "
        f"({loss.low:.3g} to {loss.high:.3g})."
    )
    if comparison.worse_from is None:
        yield f"No larger batch measured here costs quality: worth it up to {worth_it.effective_batch}, maybe beyond."
    else:
        yield (
            f"Up to effective batch {worth_it.effective_batch} a larger batch costs no quality that {len(best.runs)} "
            f"seeds could show; {comparison.worse_from} does."
        )
    if noise:
        yield f"Gradient noise scale there: {shown(noise)} targets, from {noise.windows} windows."


def shown(noise: NoiseScaleEstimate) -> str:
    return f"{noise.noise_scale:.3g} ({noise.low:.3g} to {noise.high:.3g})"

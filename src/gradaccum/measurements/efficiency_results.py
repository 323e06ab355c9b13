"""What the arms show: metrics, curve, tables and findings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradaccum.measurements.arms import ArmResult, ended, fields, noise_fields, point, validation_loss
from gradaccum.measurements.equal_samples import Comparison
from gradaccum.results import sentences
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Metrics, Outcome, StepSeries


def outcome_of(comparison: Comparison) -> Outcome:
    results, metrics = comparison.results, headline(comparison)
    return Outcome(
        metrics=metrics,
        curve=Curve("efficiency", "effective_batch", tuple(arm_point(each, comparison) for each in results)),
        summary=[row(each, comparison) for each in results],
        findings=list(findings(metrics)),
        tables={"learning": [line for each in results for line in learning(each)]},
        series=[line for each in results for line in step_series(each)],
    )


def headline(comparison: Comparison) -> dict[str, Any]:
    reference, worth_it, worse, noisy = comparison.reference, comparison.worth_it, comparison.worse, comparison.noisy
    return {
        "reference_effective_batch": reference.effective_batch if reference else None,
        **fields(ended(reference) if reference else None, "reference_validation_loss"),
        **fields(reference.over_seeds(validation_loss, 0) if reference else None, "validation_loss_before"),
        "worth_it_up_to_effective_batch": worth_it.effective_batch if worth_it else None,
        **fields(comparison.above_reference(worth_it), "worth_it_loss_above_reference"),
        "worse_from_effective_batch": comparison.worse_from,
        **fields(comparison.above_reference(worse), "worse_from_loss_above_reference"),
        "worse_from_failed_runs": worse.failed_runs if worse else None,
        "target_loss": comparison.target_loss,
        "common_target_loss": comparison.common_target_loss,
        "noise_scale_effective_batch": noisy.effective_batch if noisy else None,
        **noise_fields(noisy.noise if noisy else []),
        "failed_runs": sum(each.failed_runs for each in comparison.results),
        "seeds": len(comparison.results[0].runs),
    }


def arm_point(result: ArmResult, comparison: Comparison) -> dict[str, Any]:
    return {
        **point(result, result.arm.name),
        **fields(comparison.above_reference(result), "loss_above_reference"),
        **noise_fields(result.noise),
        **fields(comparison.samples_to(comparison.target_loss, result), "samples_to_target"),
        **fields(comparison.samples_to(comparison.common_target_loss, result), "samples_to_common_target"),
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
        }


def step_series(result: ArmResult) -> Iterator[StepSeries]:
    """The same for the tracker, where the curves of all arms overlay against samples; and the noise scale's."""
    rows = list(learning(result))
    samples, steps = ([line[axis] for line in rows] for axis in ("samples", "steps"))
    for name in ("validation_loss", "validation_accuracy", "train_loss"):
        known = [(at, line[name]) for at, line in zip(samples, rows, strict=True) if line[name] is not None]
        if known:
            at, values = zip(*known, strict=True)
            yield StepSeries(f"{result.arm.name}/{name}_by_samples/b{result.effective_batch}", at, values)
    losses = [line["validation_loss"] for line in rows]
    yield StepSeries(f"{result.arm.name}/validation_loss_by_steps/b{result.effective_batch}", steps, losses)
    scales = noise_fields(result.noise)
    middles = {name: samples[-1] * (2 * number + 1) // 8 for number, name in enumerate(sentences.QUARTERS)}
    known = [(at, scales[name]) for name, at in middles.items() if scales[name] is not None]
    if known:
        at, values = zip(*known, strict=True)
        yield StepSeries(f"{result.arm.name}/noise_scale_by_samples/b{result.effective_batch}", at, values)


def row(result: ArmResult, comparison: Comparison) -> dict[str, Any]:
    loss, above, noise = ended(result), comparison.above_reference(result), noise_fields(result.noise)
    at = result.learning[-1]
    scales = [noise[name] for name in sentences.QUARTERS]
    return {
        "effective batch": result.effective_batch,
        "steps": at.steps,
        "lr": result.arm.settings.lr,
        "validation loss": f"{loss.mean:.3g} ({loss.low:.3g} to {loss.high:.3g})" if loss else "failed",
        "above the smallest": f"{above.mean:+.2g} ({above.low:+.2g} to {above.high:+.2g})" if above else None,
        "accuracy": at.validation_accuracy.mean if at.validation_accuracy else None,
        "failed": result.failed_runs,
        "noise scale by quarter": " ".join("-" if each is None else f"{each:.3g}" for each in scales),
    }


def findings(metrics: Metrics) -> Iterator[str]:
    nothing = sentences.nothing_to_compare(metrics)
    if nothing:
        yield nothing
        return
    yield sentences.quality(metrics)
    noise = sentences.noise_scale(metrics)
    if noise:
        yield noise

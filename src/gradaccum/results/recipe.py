"""A one-page recipe for another repository, with the damage of each mistake as it was just measured."""

from __future__ import annotations

from collections.abc import Mapping

from gradaccum.results.curve import Curve, Point
from gradaccum.results.outcome import Metrics
from gradaccum.results.sizes import ratio, shown_bytes
from gradaccum.results.worth import timing_doubt

MISTAKES = {
    "naive": "the loss is not divided",
    "mean_of_means": "each micro-batch's mean weighs the same, though their counts differ",
    "step_every_micro": "the optimizer steps inside the window",
    "naive_clipped": "the loss is not divided, and the gradient is clipped",
    "clip_every_micro": "the gradient is clipped after each micro-batch",
}

PAGE = """\
---
name: gradient-accumulation
description: Train at an effective batch that does not fit in memory, and get the gradient of the full batch.
---
# Gradient accumulation

**Use it** when the batch that you want does not fit in memory, or when reducing gradients over ranks is slow.
It makes a step's gradient less noisy; it does not make samples cheaper beyond the point where the curve flattens.

`effective_batch = micro_batch * accum_steps * world_size`

## The loop
```python
for window in windows(loader, accum_steps):            # lists of micro-batches; the last may be shorter
    count = sum(number_of_targets(batch) for batch in window)
    for index, batch in enumerate(window):
        last = index == len(window) - 1
        with nullcontext() if last or world_size == 1 else model.no_sync():   # around forward AND backward
            (loss_sum(model, batch) / count).backward()
    clip_grad_norm_(model.parameters(), clip_norm)     # once, on the whole gradient
    optimizer.step()                                   # once a window, and only here
    scheduler.step()
    optimizer.zero_grad()
```
- **Divide the sum of the loss by the targets of the whole window** (samples, or unmasked tokens), not each mean by N:
  that is right for a smaller last micro-batch and for unequal token counts too.
- Over several ranks, sum `count` over them before the first backward pass, and multiply the loss by `world_size`, since
  DistributedDataParallel averages.
- **Reduce on the last micro-batch only**; step, clip, unscale and tick the scheduler once a window.
- **Log** for each optimizer step: loss (mean over targets), gradient norm before clipping, samples, samples/s, syncs.

## The usual mistakes, measured
{mistakes}

The last loss is one window's; beside it stands that of the loop that was meant, on the same micro-batches, and clipped
where the mistake clips. A lower one is no merit where the mistake amounts to a larger learning rate or to more steps
than were meant.

## What to expect on this machine
{doubt}- {equivalence}
- {throughput}
- {flattens}
- {over_ranks}
- {memory}
- {plan}

## How large is worth it
{worth}

Choose the micro-batch by what memory holds, then `accum_steps` by this. Train a short run at a few effective batches on
the *same samples*; the loss on equal samples tells, not the loss on equal steps. Keep AdamW's second moment at its
half-life in samples when the batch changes: `beta2' = beta2 ** (new_batch / old_batch)`.

Measured on: {machine}.
"""


def recipe(metrics: Mapping[str, Metrics], curves: Mapping[str, Curve], machine: Metrics, *, worth: str) -> str:
    """The page, from the stages' metrics and curves, `environment.json` and what is worth it."""
    ablation, doubt = curves["ablation"], timing_doubt(metrics["throughput"], curves["throughput"])
    most = max(point["accum_steps"] for point in ablation.points)
    at_most = {point["series"]: point for point in ablation.points if point["accum_steps"] == most}
    lines = [
        "| mistake | optimizer | gradient norm, times the right | parameter error, step 1 | last loss | right loop's |",
        "|---|---|---|---|---|---|",
        *(_mistake(point, at_most.get(point["right_loop"])) for point in at_most.values() if point["right_loop"]),
    ]
    effective = ablation.points[0]["effective_batch"]
    return PAGE.format(
        mistakes="\n".join([f"At effective batch {effective}, N = {most}:", "", *lines]),
        doubt=f"- {doubt}\n" if doubt else "",
        machine=", ".join(f"{key} {machine[key]}" for key in ("cpu", "gpu", "torch", "python") if machine.get(key)),
        worth=worth,
        **expectations(metrics["equivalence"], metrics["throughput"]),
        **_settings(metrics["memory"], metrics["plan"]),
        over_ranks=_over_ranks(metrics["distributed"]),
    )


def expectations(equivalence: Metrics, throughput: Metrics) -> dict[str, str]:
    """What the page says to expect, in sentences by what they are about."""
    return {
        "equivalence": (
            f"The accumulated gradient is the full batch's: largest difference {equivalence['max_grad_diff']:.1e} in "
            f"float32, {equivalence['max_grad_rel_diff_float64']:.1e} (relative) in float64."
            f"{_in_bf16(equivalence)}"
        ),
        "throughput": (
            f"A step takes N x {throughput['t_micro_ms']:.3g} ms + {throughput['t_step_ms']:.3g} ms; at most "
            f"{throughput['peak_samples_per_sec']:.0f} samples/s were seen."
        ),
        "flattens": (
            f"By these times the curve flattens at effective batch {throughput['flattens_at_effective_batch']}, which "
            f"is as sure as they are: they miss what was timed by up to {throughput['max_rel_residual']:.1%}."
        ),
    }


def _in_bf16(equivalence: Metrics) -> str:
    """What the stage measures where its precision is bf16."""
    if "bf16_grad_error_bf16_sums" not in equivalence:
        return ""
    summed, kept = equivalence["bf16_grad_error_bf16_sums"], equivalence["bf16_grad_error_float32_sums"]
    return (
        f" In a bf16 model 512 micro-batches end {summed:.1%} from the true gradient where they are summed in bf16, "
        f"and {kept:.1%} where they are summed in float32 and rounded once."
    )


def _over_ranks(distributed: Metrics) -> str:
    times = {key.partition("/")[0]: value for key, value in distributed.items() if key.endswith("/step_time_ratio")}
    steps = max(round(value) for key, value in distributed.items() if key.endswith("/reduced_bytes_ratio"))
    longer = ", ".join(f"{ratio(value)} times as long with {strategy}" for strategy, value in sorted(times.items()))
    return (
        "Over ranks, reducing on every micro-batch moves N times the gradient bytes for the same gradient; here, on "
        f"one machine and at N={steps}, a step took {longer}."
    )


def _settings(memory: Metrics, plan: Metrics) -> dict[str, str]:
    time = "" if plan["predicted_step_ms"] is None else f", {plan['predicted_step_ms']:.3g} ms a step"
    return {
        "memory": (
            "Memory does not grow with N but for the inputs (one gradient more from N=2 on), and linearly with the "
            f"micro-batch: {shown_bytes(memory['activation_bytes_per_sample'])} of activations a sample. It can be "
            "predicted without running: run a step of two micro-batches on fake tensors and count live storages."
        ),
        "plan": (
            "Take the largest micro-batch that fits with headroom, but none that gains nothing; planned here: "
            f"micro_batch={plan['micro_batch']}, accum_steps={plan['accum_steps']} "
            f"({shown_bytes(plan['predicted_bytes'])}{time})."
        ),
    }


def _mistake(point: Point, right: Point | None) -> str:
    optimizer, _, variant = point["series"].partition("/")
    ratio = point["grad_norm_ratio"]
    error = point["param_diff_step1"]
    shown = "no single gradient" if ratio is None else f"{ratio:.4g}"
    ends = f"{_ending(point)} | {'not run' if right is None else _ending(right)}"
    return f"| {variant}: {MISTAKES[variant]} | {optimizer} | {shown} | {error:.2g} | {ends} |"


def _ending(point: Point) -> str:
    if point["diverged_at_step"] is not None:
        return f"diverged at step {point['diverged_at_step']}"
    return f"{point['final_loss']:.4g}"

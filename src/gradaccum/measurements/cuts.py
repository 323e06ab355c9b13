"""The equivalence measurement's computation: every cut of one batch, for every optimizer, in two precisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch

from gradaccum.measurements.bench import Bench
from gradaccum.measurements.comparison import Scale, Trace, full_batch_step, scale_of, take_step
from gradaccum.measurements.diagnose import causes as diagnose_causes
from gradaccum.measurements.equivalence import Config
from gradaccum.measurements.narrow import accumulate_in_bf16
from gradaccum.measurements.setup import OptimizerName, Progress, Setup
from gradaccum.measurements.subject import Subject
from gradaccum.measurements.variants import Loop, mean_of_means, naive, scaled
from gradaccum.measurements.verdict import Difference, Verdict, judge
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome

DTYPES = (torch.float64, torch.float32)

Cut = tuple[int, ...]


@dataclass(frozen=True)
class Compared:
    """One cut against the full batch, under one optimizer.

    Attributes:
        sharp, single: differences in float64 and in float32.
        full_to_truth, cut_to_truth: float32 gradients' distance to float64's full batch, over the summed magnitudes.
        trace: the cut's, in float32.
    """

    optimizer: OptimizerName
    cut: Cut
    sharp: Difference
    single: Difference
    full_to_truth: float
    cut_to_truth: float
    verdict: Verdict
    trace: Trace
    scale: Scale

    @property
    def name(self) -> str:
        return f"{self.optimizer}, cut {cut_name(self.cut)}"


def compare_cuts(config: Config, setup: Setup, progress: Progress) -> Outcome:
    """See `gradaccum.measurements.equivalence.measure`."""
    bench = Bench.prepare(setup)
    subject, quiet = subject_of(bench, config).quiet()
    bench = replace(bench, workload=replace(bench.workload, make_model=subject.model_factory))
    comparer = Comparer(bench, config, setup)
    cases = [(optimizer, cut) for optimizer in config.optimizers for cut in config.all_cuts()]
    compared = [comparer.compare(*case, scaled) for case in progress(cases, "equivalence")]
    controls = {
        "undivided": comparer.compare(config.optimizers[0], max(config.all_cuts(), key=is_even), naive),
        "mean_of_means": comparer.compare(config.optimizers[0], config.uneven_cut(), mean_of_means),
    }
    pairs = list(compare_pairs(compared))
    wrong = [each.cut for each in compared if not each.verdict.equivalent]
    causes = diagnose_causes(subject, quiet, [subject.judge(cut) for cut in dict.fromkeys(wrong)])
    narrow = [accumulate_in_bf16(bench)] if config.precision == "bf16" else []
    return Outcome(
        metrics={**headline(compared, controls, pairs), **{k: v for each in narrow for k, v in each.metrics().items()}},
        curve=Curve("equivalence", "accum_steps", tuple(points(compared, controls, config))),
        summary=[row(each) for each in [*compared, *controls.values()]],
        findings=[
            *findings(compared, controls, pairs),
            *(f"{cause.kind}: {cause.finding} {cause.advice}" for cause in causes),
            *(each.finding() for each in narrow),
        ],
        failures=[*failures(compared, controls), *(failure for each in narrow for failure in each.failures())],
    )


def subject_of(bench: Bench, config: Config) -> Subject:
    """The engine on this workload's first batch, to be diagnosed."""
    objective = bench.workload.objective
    batch = bench.micro_batch(bench.order(config.effective_batch))
    step = partial(scaled, objective=objective, clip_norm=None)
    return Subject(bench.workload.make_model, objective, batch, step, bench.seed)


def is_even(cut: Cut) -> tuple[bool, int]:
    """Orders cuts so that the equal one with the most micro-batches comes last."""
    return len(set(cut)) == 1, len(cut)


def cut_name(cut: Cut) -> str:
    """`4x4`, or the sizes of an uneven cut."""
    return f"{len(cut)}x{cut[0]}" if len(set(cut)) == 1 else "+".join(map(str, cut))


class Comparer:
    """Takes the steps; the full batch's only once for each optimizer and precision."""

    def __init__(self, bench: Bench, config: Config, setup: Setup) -> None:
        self.bench, self.config, self.setup = bench, config, setup
        self.indices = bench.order(config.effective_batch)
        self.references: dict[tuple[OptimizerName, torch.dtype], Trace] = {}

    def compare(self, optimizer: OptimizerName, cut: Cut, loop: Loop) -> Compared:
        sharp, single = (self.differ(optimizer, cut, loop, dtype) for dtype in DTYPES)
        truth, scale = self.reference(optimizer, torch.float64), sharp[2]
        return Compared(
            optimizer=optimizer,
            cut=cut,
            sharp=sharp[0],
            single=single[0],
            full_to_truth=Difference.between(self.reference(optimizer, torch.float32), truth, scale).grad_rel_diff,
            cut_to_truth=Difference.between(single[1], truth, scale).grad_rel_diff,
            verdict=judge(sharp[0], single[0], micro_batches=len(cut), tolerance=self.config.tolerance),
            trace=single[1],
            scale=single[2],
        )

    def differ(
        self, optimizer: OptimizerName, cut: Cut, loop: Loop, dtype: torch.dtype
    ) -> tuple[Difference, Trace, Scale]:
        settings = self.setup.optimizers.settings(optimizer)
        window = self.bench.window(self.indices, cut, dtype)
        step = partial(loop, objective=self.bench.workload.objective, clip_norm=settings.clip_norm)
        trace = take_step(self.bench, step, window, settings=settings, dtype=dtype)
        scale = scale_of(self.bench, window, settings=settings, dtype=dtype)
        return Difference.between(trace, self.reference(optimizer, dtype), scale), trace, scale

    def reference(self, optimizer: OptimizerName, dtype: torch.dtype) -> Trace:
        if (optimizer, dtype) not in self.references:
            settings = self.setup.optimizers.settings(optimizer)
            self.references[optimizer, dtype] = take_step(
                self.bench,
                full_batch_step(self.bench.workload.objective, settings.clip_norm),
                self.bench.window(self.indices, [len(self.indices)], dtype),
                settings=settings,
                dtype=dtype,
            )
        return self.references[optimizer, dtype]


@dataclass(frozen=True)
class Pair:
    """Two cuts of the same batch, compared with each other."""

    name: str
    difference: Difference


def compare_pairs(compared: Sequence[Compared]) -> Iterator[Pair]:
    for one, other in combinations(compared, 2):
        if one.optimizer == other.optimizer:
            name = f"{one.name} against {cut_name(other.cut)}"
            yield Pair(name, Difference.between(one.trace, other.trace, one.scale))


def headline(compared: Sequence[Compared], controls: dict[str, Compared], pairs: Sequence[Pair]) -> dict[str, Any]:
    return {
        "max_grad_diff": max(each.single.max_grad_diff for each in compared),
        "max_param_diff": max(each.single.max_param_diff for each in compared),
        "max_grad_rel_diff_float64": max(each.sharp.grad_rel_diff for each in compared),
        "max_pair_grad_diff": max((pair.difference.max_grad_diff for pair in pairs), default=0.0),
        "optimizer_steps_per_window": max(each.trace.optimizer_steps for each in compared),
        "kinks": sum(each.verdict.kink for each in compared),
        "undivided_rejected": not controls["undivided"].verdict.equivalent,
        "mean_of_means_rejected": not controls["mean_of_means"].verdict.equivalent,
        "equivalent": not list(failures(compared, controls)),
    }


def points(compared: Sequence[Compared], controls: dict[str, Compared], config: Config) -> Iterator[dict[str, Any]]:
    for each in compared:
        yield point(each, each.optimizer if len(set(each.cut)) == 1 else f"{each.optimizer}/uneven", config)
    for name, control in controls.items():
        yield point(control, f"control/{name}", config)


def point(each: Compared, series: str, config: Config) -> dict[str, Any]:
    even = len(set(each.cut)) == 1
    return {
        "series": series,
        "effective_batch": config.effective_batch,
        "accum_steps": len(each.cut),
        "micro_batch": each.cut[0] if even else None,
        "world_size": 1,
        "cut": None if even else list(each.cut),
        "max_grad_diff": each.single.max_grad_diff,
        "max_param_diff": each.single.max_param_diff,
        "max_state_diff": each.single.max_state_diff,
        "loss_diff": each.single.loss_diff,
        "grad_rel_diff": each.single.grad_rel_diff,
        "param_rel_diff": each.single.param_rel_diff,
        "grad_rel_diff_float64": each.sharp.grad_rel_diff,
        "param_rel_diff_float64": each.sharp.param_rel_diff,
        "loss_rel_diff_float64": each.sharp.loss_rel_diff,
        "state_rel_diff_float64": each.sharp.state_rel_diff,
        "grad_norm_ratio": each.single.norm_ratio,
        "full_to_truth": each.full_to_truth,
        "cut_to_truth": each.cut_to_truth,
        "optimizer_steps": each.trace.optimizer_steps,
        "kink": each.verdict.kink,
        "equivalent": each.verdict.equivalent,
    }


def row(each: Compared) -> dict[str, Any]:
    return {
        "optimizer": each.optimizer,
        "cut": cut_name(each.cut),
        "max grad diff": each.single.max_grad_diff,
        "max param diff": each.single.max_param_diff,
        "float64 grad rel": each.sharp.grad_rel_diff,
        "float64 state rel": each.sharp.state_rel_diff,
        "steps": each.trace.optimizer_steps,
        "verdict": "equivalent" if each.verdict.equivalent else "rejected",
    }


def findings(compared: Sequence[Compared], controls: dict[str, Compared], pairs: Sequence[Pair]) -> Iterator[str]:
    if pairs:
        worst = max(pairs, key=lambda pair: pair.difference.max_grad_diff)
        yield f"Largest gradient difference between any two cuts: {worst.difference.max_grad_diff:.1e} ({worst.name})."
    for each in compared:
        if each.verdict.kink:
            yield (
                f"{each.name}: a kink. float64 agrees; in float32 one unit flipped. Distance to the float64 gradient: "
                f"full batch {each.full_to_truth:.1e}, this cut {each.cut_to_truth:.1e}."
            )
    for name, control in controls.items():
        if not control.verdict.equivalent:
            yield f"Control {name} ({control.name}) is rejected, as it must be: {control.verdict.problems[0]}."


def failures(compared: Sequence[Compared], controls: dict[str, Compared]) -> Iterator[str]:
    for each in compared:
        for problem in each.verdict.problems:
            yield f"{each.name}: {problem}."
        if each.trace.optimizer_steps != 1:
            yield f"{each.name}: the optimizer stepped {each.trace.optimizer_steps} times in one window, not once."
    for name, control in controls.items():
        if control.verdict.equivalent:
            yield f"The comparison is blind: the control {name} ({control.name}), a known mistake, passed."

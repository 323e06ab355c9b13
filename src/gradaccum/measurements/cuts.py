"""The equivalence measurement's computation: every cut of one batch, for every optimizer, in two precisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import torch

from gradaccum.measurements.bench import Bench
from gradaccum.measurements.causes import causes as diagnose_causes
from gradaccum.measurements.comparison import Scale, Trace, full_batch_step, require_finite, scale_of, take_step
from gradaccum.measurements.equivalence import Config
from gradaccum.measurements.judging import judge_cut
from gradaccum.measurements.model_causes import Cause
from gradaccum.measurements.narrow import NarrowErrors, accumulate_in_bf16
from gradaccum.measurements.setup import OptimizerName, Progress, Setup
from gradaccum.measurements.subject import Subject
from gradaccum.measurements.variants import Loop, mean_of_means, naive, scaled
from gradaccum.measurements.verdict import Difference, Verdict, judge

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


@dataclass(frozen=True)
class Pair:
    """Two cuts of the same batch, compared with each other."""

    name: str
    difference: Difference


@dataclass(frozen=True)
class ComparedCuts:
    """Everything that was compared.

    Attributes:
        compared: every cut under every optimizer.
        controls: known mistakes, each by its name.
        pairs: every two cuts under the same optimizer.
        causes: why cuts differ that do.
        narrow: what bf16 loses, where that was asked for.
    """

    compared: Sequence[Compared]
    controls: Mapping[str, Compared]
    pairs: Sequence[Pair]
    causes: Sequence[Cause]
    narrow: Sequence[NarrowErrors]


def compare_cuts(config: Config, setup: Setup, progress: Progress) -> ComparedCuts:
    """See `gradaccum.measurements.equivalence.measure`."""
    bench = Bench.prepare(setup)
    subject, quiet = subject_of(bench, config).quiet()
    bench = replace(bench, workload=replace(bench.workload, make_model=subject.model_factory))
    comparer = Comparer(bench, config, setup)
    cases = [(optimizer, cut) for optimizer in config.optimizers for cut in config.all_cuts()]
    compared = [comparer.compare(*case, scaled) for case in progress(cases, "equivalence")]
    wrong = [each.cut for each in compared if not each.verdict.equivalent]
    return ComparedCuts(
        compared,
        controls={
            "undivided": comparer.compare(config.optimizers[0], max(config.all_cuts(), key=is_even), naive),
            "mean_of_means": comparer.compare(config.optimizers[0], config.uneven_cut(), mean_of_means),
        },
        pairs=list(compare_pairs(compared)),
        causes=list(diagnose_causes(subject, quiet, [judge_cut(subject, cut) for cut in dict.fromkeys(wrong)])),
        narrow=[accumulate_in_bf16(bench)] if config.precision == "bf16" else [],
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
    """`2x8` is micro-batches of 2, N=8, the order of `effective_batch`; of an uneven cut the sizes."""
    return f"{cut[0]}x{len(cut)}" if len(set(cut)) == 1 else "+".join(map(str, cut))


class Comparer:
    """Takes the steps; the full batch's only once for each optimizer and precision."""

    def __init__(self, bench: Bench, config: Config, setup: Setup) -> None:
        self.bench, self.config, self.setup = bench, config, setup
        self.indices = bench.order(config.effective_batch)
        self.references: dict[tuple[OptimizerName, torch.dtype], Trace] = {}

    def compare(self, optimizer: OptimizerName, cut: Cut, loop: Loop) -> Compared:
        sharp, single = (self.differ(optimizer, cut, loop, dtype=dtype) for dtype in DTYPES)
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
        self, optimizer: OptimizerName, cut: Cut, loop: Loop, *, dtype: torch.dtype
    ) -> tuple[Difference, Trace, Scale]:
        settings = self.setup.optimizers.settings(optimizer)
        window = self.bench.window(self.indices, cut, dtype)
        step = partial(loop, objective=self.bench.workload.objective, clip_norm=settings.clip_norm)
        trace = take_step(self.bench, step, window, settings=settings, dtype=dtype)
        require_finite(trace, optimizer, settings)
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


def compare_pairs(compared: Sequence[Compared]) -> Iterator[Pair]:
    for one, other in combinations(compared, 2):
        if one.optimizer == other.optimizer:
            name = f"{one.name} against {cut_name(other.cut)}"
            yield Pair(name, Difference.between(one.trace, other.trace, one.scale))

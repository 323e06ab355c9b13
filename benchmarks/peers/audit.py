"""Everybody's loops, audited: which windows does each accumulate rightly, how wrong are the others, what does it cost?

Needs the extra `peers`. Run from the project's root: `python -m benchmarks.peers`. It writes
benchmarks/peers/results.md.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks import overhead
from benchmarks.loops import Loop, Window, bare, engine
from benchmarks.peers.loops import PEERS, fabric_as_documented
from benchmarks.timing import Timing
from gradaccum import Objective, diagnose
from gradaccum.measurements.judging import CutDiagnosis

PAGE = Path(__file__).with_name("results.md")
LOOPS: dict[str, Loop] = {
    "gradaccum": engine,
    "bare loop": bare,
    **PEERS,
    "Fabric, with no division written, as none is shown there": fabric_as_documented,
}
FEATURES, CLASSES, TOKENS = 8, 5, 7
ACCUM_STEPS = 4


@dataclass(frozen=True)
class Scenario:
    """A window, cut from one batch, for loops that are set to four accumulation steps."""

    name: str
    cut: tuple[int, ...]
    batch: tuple[Tensor, Tensor]


def scenarios() -> Iterator[Scenario]:
    generator = torch.Generator().manual_seed(0)

    def batch(samples: int) -> tuple[Tensor, Tensor]:
        shape = (samples, TOKENS)
        return (
            torch.randn(*shape, FEATURES, generator=generator),
            torch.randint(CLASSES, shape, generator=generator),
        )

    yield Scenario("equal cuts", (4, 4, 4, 4), batch(16))
    yield Scenario("ragged tail", (4, 4, 2), batch(10))
    inputs, labels = batch(16)
    lengths = torch.arange(16) % TOKENS + 1
    yield Scenario("unequal token counts", (4, 4, 4, 4), (inputs, _masked(labels, lengths)))
    lengths[4:8] = 0
    yield Scenario("an all-masked micro-batch", (4, 4, 4, 4), (inputs, _masked(labels, lengths)))


def _masked(labels: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(torch.arange(TOKENS) < lengths[:, None], labels, -100)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, CLASSES))


def audit(loop: Loop, scenario: Scenario) -> CutDiagnosis:
    def step(model: nn.Module, optimizer: Optimizer, micro_batches: Window) -> None:
        loop(model, optimizer, ACCUM_STEPS)([micro_batches])

    found = diagnose(network, Objective.classification(), scenario.batch, cuts=[scenario.cut], step=step)
    return found.cuts[0]


def cell(found: CutDiagnosis) -> str:
    if found.equivalent:
        return "right"
    if not found.optimizer_steps:
        return "**wrong**: never steps"
    return f"**wrong**: gradient norm x {found.sharp.norm_ratio:.3g}"


def costs() -> dict[int, dict[str, Timing]]:
    """The small MLP, where a loop costs most beside its model, all loops with the same fused optimizer."""
    loops = {name: (loop, True) for name, loop in {"engine": engine, "bare": bare, **PEERS}.items()}
    return {
        accum_steps: overhead.timings(overhead.tiny_mlp, accum_steps, loops, budget=64)
        for accum_steps in overhead.ACCUM_STEPS
    }


def page(
    results: dict[str, Sequence[CutDiagnosis]], names: Sequence[str], timed: dict[int, dict[str, Timing]]
) -> Iterator[str]:
    packages = [f"{name} {version(name)}" for name in ("torch", "accelerate", "lightning")]
    yield "# Everybody's loops, audited"
    yield ""
    yield (
        "One window through each loop, set to 4 accumulation steps and given the mean cross-entropy of a micro-batch, "
        "as its documentation shows; compared in float64 and float32 with one step over the whole window as one batch. "
        "Later windows tell whether something of the first is left. Fabric's loop is the documented one, which steps "
        "where `iteration % N == 0`; a bare loop as tutorials write it, with `(i + 1) % N`, does the same with a "
        "ragged tail, and the bare loop here steps at the end of each window. "
        f"Python {platform.python_version()}, {', '.join(packages)}. "
        "Made by `python -m benchmarks.peers`, after `pip install -e '.[peers]'`."
    )
    yield ""
    yield f"| loop | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for loop, found in results.items():
        yield f"| {loop} | {' | '.join(map(cell, found))} |"
    yield ""
    yield "What each does instead:"
    yield ""
    for loop, found in results.items():
        for name, each in zip(names, found, strict=True):
            if not each.equivalent:
                yield f"- {loop}, {name}: {each.mistake or each.verdict.problems[0]}."
    yield ""
    yield (
        "What a step costs, our engine over each: CPU time at one thread on an MLP 64-128-128-16 with micro-batches "
        "of 4, all with the same fused AdamW; median of interleaved rounds, and their quartiles. Above 1 the engine is "
        "dearer. Accelerate and Lightning Trainer read a DataLoader, as they are used, and pay for it; engine, bare "
        "loop and Fabric go through a list. Larger models, and torch's default optimizer: "
        "[overhead.md](../overhead.md)."
    )
    yield ""
    yield from overhead.rows(timed)
    yield ""
    yield WHERE_WE_LOSE


WHERE_WE_LOSE = """\
Where the others are ahead:

- A loop that is given a mean can only weigh micro-batches alike. The engine asks for more: the loss as a sum, and a
  count that is known before the forward pass. A loss whose count only the model knows does not fit it.
- Accelerate and Lightning also place the model, wrap it for many kinds of accelerators and ranks, log, and write
  checkpoints. The engine does one optimizer step.
- Accelerate's guide also has a loop for unequal token counts, in which the user sums losses, counts targets and scales
  by hand; done so, it is right. Audited here is the loop that its users start from.
- At one accumulation step little is saved by not dividing, and the norm that the engine always measures costs: the
  bare loop, which measures nothing, is cheaper there on small models.
"""


def main() -> None:
    torch.set_num_threads(1)
    cases = list(scenarios())
    results = {name: [audit(loop, case) for case in cases] for name, loop in LOOPS.items()}
    text = "\n".join(page(results, [case.name for case in cases], costs()))
    PAGE.write_text(text)
    print(text)

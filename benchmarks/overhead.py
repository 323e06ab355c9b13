"""What a window costs: this engine against the bare loop, per optimizer step, in CPU time at one thread.

Run from the project's root: `python -m benchmarks.overhead`. It writes benchmarks/overhead.md. With the extra `peers`
installed, Accelerate, Fabric and Trainer are timed in the same rounds.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from benchmarks.loops import Loop, Window, bare, engine
from benchmarks.timing import Timing, interleave
from gradaccum.workloads.networks import ByteTransformer, mlp

ACCUM_STEPS = (1, 4, 16, 64)
ROUNDS = 15
PAGE = Path(__file__).with_name("overhead.md")


def tiny_mlp() -> tuple[nn.Module, Callable[[int], Window]]:
    """64-128-128-16, micro-batches of 4."""
    return mlp([64, 128, 128, 16]), lambda n: [(torch.randn(4, 64), torch.randint(16, (4,))) for _ in range(n)]


def transformer() -> tuple[nn.Module, Callable[[int], Window]]:
    """4 layers, width 128, 128 bytes, micro-batches of 8."""
    shape = (8, 128)
    return (
        ByteTransformer(layers=4, width=128, heads=4, context=128),
        lambda n: [(torch.randint(256, shape), torch.randint(256, shape)) for _ in range(n)],
    )


def timings(
    make: Callable[[], tuple[nn.Module, Callable[[int], Window]]],
    accum_steps: int,
    loops: Mapping[str, tuple[Loop, bool]],
    *,
    budget: int,
    rounds: int = ROUNDS,
) -> dict[str, Timing]:
    """Every loop, each on a model of its own, over `budget` micro-batches a round (at least two windows)."""
    windows = max(2, budget // accum_steps)
    runs: dict[str, Callable[[], float | None]] = {}
    for name, (loop, fused) in loops.items():
        torch.manual_seed(0)
        model, make_window = make()
        options = {"fused": True} if fused else {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        runs[name] = partial(loop(model, optimizer, accum_steps), [make_window(accum_steps)] * windows)
    return interleave(runs, windows=windows, rounds=rounds)


def peers() -> dict[str, tuple[Loop, bool]]:
    if not (find_spec("accelerate") and find_spec("lightning")):
        return {}
    from benchmarks.peers.loops import PEERS  # noqa: PLC0415 (an extra that need not be there)

    return {name: (loop, True) for name, loop in PEERS.items()}


def rows(results: Mapping[int, Mapping[str, Timing]]) -> Iterator[str]:
    names = [name for name in next(iter(results.values())) if name != "engine"]
    yield f"| N | engine, us | {' | '.join(f'engine / {name}' for name in names)} |"
    yield "|---" * (len(names) + 2) + "|"
    for accum_steps, timing in results.items():
        ratios = " | ".join(f"{timing['engine'].over(timing[name]):.2f}" for name in names)
        yield f"| {accum_steps} | {timing['engine'].median_us:.0f} | {ratios} |"


def page(sections: Mapping[str, Mapping[int, Mapping[str, Timing]]]) -> str:
    packages = [f"{name} {version(name)}" for name in ("torch", "accelerate", "lightning") if find_spec(name)]
    intro = (
        "CPU time of one optimizer step at one thread, our engine with loss and gradient norm tracked, over that of "
        f"another loop in the same rounds: median and quartiles of {ROUNDS} rounds. Below 1 the engine is cheaper. "
        "`bare` is `(loss / N).backward()`, `step()`, `zero_grad()`, which tracks nothing. "
        f"Python {platform.python_version()}, {', '.join(packages)}. Made by `python -m benchmarks.overhead`."
    )
    lines = ["# What a window costs", "", intro]
    for title, results in sections.items():
        lines += ["", f"## {title}", "", *rows(results)]
    return "\n".join(lines) + "\n"


def main(accum_steps: Sequence[int] = ACCUM_STEPS) -> None:
    torch.set_num_threads(1)
    own = {"engine": (engine, True), "bare, same fused AdamW": (bare, True), "bare, default AdamW": (bare, False)}
    everybody = {**own, **peers()}
    small = {n: timings(tiny_mlp, n, everybody, budget=64) for n in accum_steps}
    large = {n: timings(transformer, n, own, budget=2) for n in accum_steps if n <= 4}
    text = page(
        {"MLP 64-128-128-16, micro-batches of 4": small, "4-layer transformer, d=128, T=128, micro-batches of 8": large}
    )
    PAGE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

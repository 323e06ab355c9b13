"""What every measurement shares: the top-level keys of params.yaml. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from gradaccum.errors import ConfigError
from gradaccum.workloads.choice import WorkloadChoice

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

PositiveInt = Annotated[int, Field(strict=True, ge=1, lt=2**40)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
OptimizerName = Literal["sgd", "adamw"]

Item = TypeVar("Item")


class Progress(Protocol):
    """Goes through items and shows how far it is."""

    def __call__(self, items: Sequence[Item], label: str) -> Iterable[Item]: ...


def no_progress(items: Sequence[Item], label: str) -> Iterable[Item]:
    """Shows nothing."""
    del label
    return items


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SGD:
    """torch.optim.SGD's settings, and the clip that goes with them."""

    lr: PositiveFloat
    momentum: Fraction = 0.0
    weight_decay: NotNegative = 0.0
    clip_norm: PositiveFloat | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdamW:
    """torch.optim.AdamW's settings, and the clip that goes with them."""

    lr: PositiveFloat
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NotNegative = 0.01
    clip_norm: PositiveFloat | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Optimizers:
    """One place for the settings of each optimizer; what is left out is torch's own default."""

    sgd: SGD
    adamw: AdamW

    def settings(self, name: OptimizerName) -> SGD | AdamW:
        return self.sgd if name == "sgd" else self.adamw


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Setup:
    """Seed, device, threads, workload and optimizers of a measurement."""

    seed: Seed
    device: Literal["auto", "cpu", "cuda"]
    threads: Annotated[PositiveInt, Field(le=1024)]
    workload: Annotated[WorkloadChoice, BeforeValidator(WorkloadChoice.parse)]
    optimizers: Optimizers


def require_divisors(effective_batch: int, accum_steps: Iterable[int]) -> None:
    """Refuse accumulation steps that do not cut the effective batch into equal micro-batches."""
    for steps in accum_steps:
        if effective_batch % steps:
            raise ConfigError(
                f"accum_steps holds {steps}, which does not divide effective_batch={effective_batch}, so the "
                f"micro-batches would differ in size. Choose from {divisors(effective_batch)}."
            )


def divisors(number: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def require_distinct(name: str, values: Sequence[Any]) -> None:
    """Refuse a list in which something stands twice."""
    twice = sorted({str(value) for value in values if list(values).count(value) > 1})
    if twice:
        raise ConfigError(f"{name} holds {', '.join(twice)} more than once, which measures nothing new. List it once.")


def settings_of(optimizer: SGD | AdamW) -> Mapping[str, Any]:
    """The keyword arguments of torch's own optimizer."""
    return {name: value for name, value in vars(optimizer).items() if name != "clip_norm" and not name.startswith("__")}

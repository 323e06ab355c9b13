"""How settings follow the effective batch. Imports no torch."""

from __future__ import annotations

import math
from typing import Literal

Scaling = Literal["none", "linear", "sqrt"]
Beta2Rule = Literal["fixed", "half_life"]
Decay = Literal["none", "linear"]


def scaled_lr(base_lr: float, times: float, scaling: Scaling) -> float:
    """Learning rate at `times` the base effective batch.

    `linear` is the rule of Goyal et al. 2017, arXiv 1706.02677, section 2.1, for SGD; `sqrt` keeps the noise of a step
    the same (Krizhevsky 2014, arXiv 1404.5997, section 5), and is Adam's rule in Malladi et al. 2022, arXiv 2205.10287,
    which scales the betas and epsilon along with it.
    """
    return base_lr * {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[scaling]


def scaled_beta2(beta2: float, times: float, rule: Beta2Rule) -> float:
    """AdamW's second decay rate at `times` the base effective batch.

    `half_life` keeps the second moment's half-life in samples: `beta2 ** times` (Marek et al. 2025, arXiv 2507.07101).
    """
    return beta2**times if rule == "half_life" else beta2


def warm_up(samples: int, *, over: float, start: float) -> float:
    """Share of the full learning rate after so many samples: a straight line from `start` to 1 (Goyal, section 2.2)."""
    return 1.0 if samples >= over else start + (1 - start) * samples / over


def decayed(samples: int, *, over: int, decay: Decay) -> float:
    """Share of the learning rate that is left after so many samples: `linear` reaches 0 when all `over` are seen.

    A rate that stays up ends a run in noise of its own, in which the arms' differences drown.
    """
    return 1 - samples / over if decay == "linear" else 1.0

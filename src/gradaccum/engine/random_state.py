"""The random number generators that a training loop draws from."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gradaccum.errors import StateError


def random_state() -> dict[str, Any]:
    """State of torch's generators (CPU, every CUDA device), numpy's global one and Python's.

    Only tensors, numbers, strings and tuples, so that `torch.load(..., weights_only=True)` reads it.
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }


def require_random_state(state: Mapping[str, Any]) -> None:
    """Refuse what `set_random_state` could use only half of."""
    missing = {"torch", "cuda", "numpy", "python"} - state.keys()
    if missing:
        raise StateError(f"the state lacks the random state of {', '.join(sorted(missing))}. Save all of state_dict().")


def set_random_state(state: Mapping[str, Any]) -> None:
    """Continue the generators where `random_state` saw them."""
    name, keys, *rest = state["numpy"]
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])

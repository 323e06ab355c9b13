"""What a batch may be made of, gone through and rebuilt: containers of tensors, however deep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from gradaccum.errors import BatchError

Structure = Any
"""A tensor, None, or a tuple, list, mapping or dataclass of structures."""


def tensors_of(structure: Structure) -> Iterator[Tensor]:
    """Every tensor of a batch, in order."""
    for leaf in leaves(structure):
        if isinstance(leaf, Tensor):
            yield leaf
        elif leaf is not None:
            raise _unknown(leaf)


def leaves(structure: Structure) -> Iterator[Any]:
    """What the containers hold in the end: tensors, None, and what has no place in a batch."""
    inside = _items(structure)
    if inside is None:
        yield structure
        return
    for item in inside:
        yield from leaves(item)


def _items(structure: Structure) -> Iterable[Structure] | None:
    """What a container holds; None for what is none."""
    if isinstance(structure, Mapping):
        return structure.values()
    if isinstance(structure, tuple | list):
        return structure
    if is_dataclass(structure) and not isinstance(structure, type):
        return [getattr(structure, field.name) for field in fields(structure)]
    return None


def map_tensors(structure: Structure, change: Callable[[Tensor], Tensor]) -> Structure:
    """The same structure with every tensor changed."""
    if isinstance(structure, Tensor):
        return change(structure)
    if structure is None:
        return None
    if isinstance(structure, Mapping):
        return _with_values(structure, {key: map_tensors(value, change) for key, value in structure.items()})
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):  # a named tuple takes its fields one by one
        return type(structure)(*(map_tensors(item, change) for item in structure))
    if isinstance(structure, tuple | list):
        return type(structure)(map_tensors(item, change) for item in structure)
    if is_dataclass(structure) and not isinstance(structure, type):
        return replace(
            structure,
            **{f.name: map_tensors(getattr(structure, f.name), change) for f in fields(structure) if f.init},
        )
    raise _unknown(structure)


def _with_values(structure: Mapping[Any, Structure], values: dict[Any, Structure]) -> Mapping[Any, Structure]:
    """Filled in a copy, since a mapping's type may want other things when made (a defaultdict its factory)."""
    if not isinstance(structure, MutableMapping):
        return values
    filled = copy(structure)
    filled.update(values)
    return filled


def _unknown(structure: Structure) -> BatchError:
    return BatchError(
        "a batch may hold tensors, None and tuples, lists, mappings or dataclasses of them, but this one holds a "
        f"{type(structure).__name__}, and how to cut that is unknown. Turn it into a tensor, or leave it out."
    )

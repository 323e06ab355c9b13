"""The bundled text as term and definition: only definition bytes are targets, so micro-batches count differently."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradaccum.engine.objective import Objective
from gradaccum.workloads.accuracy import correct_labels
from gradaccum.workloads.networks import ByteTransformer
from gradaccum.workloads.text import Entry, entries
from gradaccum.workloads.workload import Workload

LONGEST_DEFINITION = 300
CONTEXT = 512
IGNORED = -100

Pair = tuple[Tensor, Tensor]


def workload() -> Workload:
    """Batches: bytes `[samples, longest]` and labels of that shape, -100 on term and padding."""
    train, validation = entries()
    return Workload(
        name="definitions",
        make_model=lambda: ByteTransformer(layers=2, width=64, heads=4, context=CONTEXT),
        objective=Objective.classification(ignore_index=IGNORED),
        train=pairs(train),
        validation=pairs(validation),
        collate=pad,
        correct=correct_labels,
    )


def pairs(texts: Sequence[Entry]) -> list[Pair]:
    """Inputs and labels of every entry whose definition is short enough; a zero byte ends a definition."""
    return [pair(entry) for entry in texts if len(entry.definition) <= LONGEST_DEFINITION]


def pair(entry: Entry) -> Pair:
    term, definition = f"{entry.term}\n".encode(), f"{entry.definition}\0".encode()
    text = torch.tensor(list(term + definition))
    labels = text[1:].clone()
    labels[: len(term) - 1] = IGNORED
    return text[:-1], labels


def pad(samples: Sequence[Pair]) -> Pair:
    """One micro-batch, as long as its longest sample; the model is causal, so padding behind a text changes nothing."""
    inputs, labels = zip(*samples, strict=True)
    return (
        pad_sequence(list(inputs), batch_first=True),
        pad_sequence(list(labels), batch_first=True, padding_value=IGNORED),
    )

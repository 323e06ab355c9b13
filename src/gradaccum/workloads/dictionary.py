"""The bundled text, packed: a byte-level transformer in which every byte is a target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import TensorDataset, default_collate

from gradaccum.engine.objective import Objective
from gradaccum.workloads.accuracy import correct_labels
from gradaccum.workloads.networks import ByteTransformer
from gradaccum.workloads.text import Entry, entries
from gradaccum.workloads.workload import Workload

CONTEXT = 64


def workload() -> Workload:
    """Batches: bytes `[samples, 64]` and the bytes that follow them, `[samples, 64]`."""
    train, validation = entries()
    return Workload(
        name="dictionary",
        make_model=lambda: ByteTransformer(layers=2, width=64, heads=4, context=CONTEXT),
        objective=Objective.classification(),
        train=packed(train),
        validation=packed(validation),
        collate=default_collate,
        correct=correct_labels,
    )


def packed(texts: Sequence[Entry]) -> TensorDataset:
    """All entries as one text, cut into pieces of `CONTEXT` bytes and the byte after each."""
    text = "\n\n".join(f"{entry.term}\n{entry.definition}" for entry in texts)
    stream = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    pieces = stream[: (len(stream) - 1) // CONTEXT * CONTEXT + 1]
    return TensorDataset(pieces[:-1].view(-1, CONTEXT), pieces[1:].view(-1, CONTEXT))

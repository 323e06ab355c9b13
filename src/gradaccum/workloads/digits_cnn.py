"""The digits of `gradaccum.workloads.digits`, seen by a small convolutional network, whose memory is activations."""

from __future__ import annotations

from dataclasses import replace

from gradaccum.workloads import digits
from gradaccum.workloads.networks import cnn
from gradaccum.workloads.workload import Workload


def workload() -> Workload:
    """Batches: inputs `[samples, 64]` in 0..1, labels `[samples]` in 0..9."""
    return replace(digits.workload(), name="digits_cnn", make_model=lambda: cnn(16, 10))

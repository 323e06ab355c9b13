"""How far memory rose above a baseline, as the system and the device count it."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Of glibc's mallopt(3)."""


def give_freed_memory_back() -> None:
    """Let glibc return freed memory, now and from now on, so that what the process holds is what it uses.

    With another C library this does nothing, and what the process holds says less.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        for option, value in ((MMAP_THRESHOLD, 65536), (TRIM_THRESHOLD, 65536), (TOP_PAD, 0)):
            libc.mallopt(option, value)
        libc.malloc_trim(0)


class ProcessPeak:
    """Resident memory above what it is now, at its highest from now on; Linux only, None elsewhere."""

    def __init__(self) -> None:
        give_freed_memory_back()
        with suppress(OSError):  # without it the mark is the process's own: too high only if it was higher before
            CLEAR.write_text("5")  # the high-water mark starts anew, proc_pid_clear_refs(5)
        self.baseline = _status("VmRSS")

    def above(self) -> int | None:
        peak = _status("VmHWM")
        return None if peak is None or self.baseline is None else max(0, peak - self.baseline)


class DevicePeak:
    """Memory allocated on a CUDA device above what it is now, at its highest from now on; None on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.type == "cuda" else None
        if self.device:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.baseline = torch.cuda.memory_allocated(self.device)

    def above(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) - self.baseline if self.device else None


def _status(key: str) -> int | None:
    """Bytes of one line of the process's status, which counts in kB."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)

"""What the machine decides: the facts that make two timings, or two roundings, incomparable. Imports no torch."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gradaccum.errors import ConfigError

DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
"""Of NVIDIA, of its boards, of any GPU under WSL, and of AMD, whose GPUs torch calls cuda too."""

PACKAGES = {"torch": "torch", "numpy": "numpy", "scikit_learn": "scikit-learn"}


def describe() -> dict[str, str | int | None]:
    """Python, packages, CPU, cores and GPU; thread settings are params and not here."""
    return {
        "python": platform.python_version(),
        **{key: _version(package) for key, package in PACKAGES.items()},
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": _gpu(),
    }


def require_cuda() -> None:
    """Refuse to go on where no CUDA device can be, as far as that can be told without torch.

    Raises:
        ConfigError: torch is a build for CPUs, or the system shows no driver of a GPU.
    """
    build = _version("torch") or ""
    if build.endswith("+cpu"):
        why = f"torch {build} is a build for CPUs"
    elif not any(Path(driver).exists() for driver in DRIVERS) and _gpu() is None:
        why = "this machine shows no GPU"
    else:
        return
    raise ConfigError(f"device = 'cuda', but {why}. Set device to auto or cpu.")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    """The model's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str | None:
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return ", ".join(names) or None


def _output(*command: str) -> str:
    """What a command prints; nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()

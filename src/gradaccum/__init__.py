"""Gradient accumulation that is right on every window. Importing the package imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradaccum.engine.accumulator import Accumulator as Accumulator
    from gradaccum.engine.batching import BatchPlan as BatchPlan
    from gradaccum.engine.batching import split as split
    from gradaccum.engine.batching import windows as windows
    from gradaccum.engine.fitting import fit_micro_batch as fit_micro_batch
    from gradaccum.engine.gradient_sync import gradient_sync as gradient_sync
    from gradaccum.engine.noise_scale import NoiseScale as NoiseScale
    from gradaccum.engine.objective import Objective as Objective
    from gradaccum.engine.precision import master_weights as master_weights
    from gradaccum.engine.step_result import StepResult as StepResult
    from gradaccum.engine.traffic import counted as counted
    from gradaccum.errors import BatchError as BatchError
    from gradaccum.errors import ConfigError as ConfigError
    from gradaccum.errors import GradaccumError as GradaccumError
    from gradaccum.errors import PreflightWarning as PreflightWarning
    from gradaccum.errors import RankError as RankError
    from gradaccum.errors import StateError as StateError
    from gradaccum.measurements.diagnose import Diagnosis as Diagnosis
    from gradaccum.measurements.diagnose import diagnose as diagnose
    from gradaccum.workloads.workload import Workload as Workload

_HOMES = {
    "Accumulator": "gradaccum.engine.accumulator",
    "BatchError": "gradaccum.errors",
    "BatchPlan": "gradaccum.engine.batching",
    "ConfigError": "gradaccum.errors",
    "Diagnosis": "gradaccum.measurements.diagnose",
    "GradaccumError": "gradaccum.errors",
    "NoiseScale": "gradaccum.engine.noise_scale",
    "Objective": "gradaccum.engine.objective",
    "PreflightWarning": "gradaccum.errors",
    "RankError": "gradaccum.errors",
    "StateError": "gradaccum.errors",
    "StepResult": "gradaccum.engine.step_result",
    "Workload": "gradaccum.workloads.workload",
    "counted": "gradaccum.engine.traffic",
    "diagnose": "gradaccum.measurements.diagnose",
    "fit_micro_batch": "gradaccum.engine.fitting",
    "gradient_sync": "gradaccum.engine.gradient_sync",
    "master_weights": "gradaccum.engine.precision",
    "split": "gradaccum.engine.batching",
    "windows": "gradaccum.engine.batching",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradaccum' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

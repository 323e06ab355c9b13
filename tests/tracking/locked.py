"""Results in the working folder, as DVC would have locked them."""

from __future__ import annotations

from pathlib import Path

from gradaccum.results.files import write_json, write_outcome
from gradaccum.results.outcome import Outcome
from gradaccum.tracking.lockfile import LockedStage, Pipeline
from gradaccum.tracking.memory import md5

PARAMS = {"seed": 7, "throughput": {"micro_batch": 4}}


def locked(outcome: Outcome, **params: object) -> Pipeline:
    """A measured stage and a report, with their files."""
    joined = write_json(Path("outputs/accum-curve.json"), outcome.curve.to_json())
    outs = {str(path): md5(path) for path in write_outcome(outcome)}
    measured = LockedStage("throughput", "python t.py", {"t.py": "1"}, {"params.yaml": {**PARAMS, **params}}, outs)
    return Pipeline({"throughput": measured, "report": LockedStage("report", "r", outs=({str(joined): md5(joined)}))})

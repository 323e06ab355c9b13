"""The project's own pipeline, as far as tracking depends on it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.tracking.dvc_project import SOURCE

STAGES: dict[str, dict[str, Any]] = yaml.safe_load((SOURCE.parent / "dvc.yaml").read_text())["stages"]


def outs(stage: dict[str, Any]) -> set[str]:
    entries = [entry for kind in ("outs", "metrics", "plots") for entry in stage.get(kind, [])]
    return {entry if isinstance(entry, str) else next(iter(entry)) for entry in entries}


@pytest.mark.parametrize("name", sorted(set(STAGES) - {"track", "environment"}))
def test_track_waits_for_the_results_of_every_stage(name: str) -> None:
    read = {path for path in outs(STAGES[name]) if not path.endswith(".csv")}

    assert read
    assert read <= set(STAGES["track"]["deps"])


def test_track_always_runs_and_leaves_nothing_that_dvc_would_compare() -> None:
    assert STAGES["track"]["always_changed"] is True
    assert outs(STAGES["track"]) == set()

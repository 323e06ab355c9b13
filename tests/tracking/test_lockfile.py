"""What dvc.lock says: the keys of stages, the state of the pipeline, and whether the files are those."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gradaccum.errors import ConfigError
from gradaccum.tracking.lockfile import LockedStage, Pipeline, read_pipeline

Lock = dict[str, Any]


def entry(path: str, content: str) -> dict[str, Any]:
    return {"path": path, "hash": "md5", "md5": hashlib.md5(content.encode()).hexdigest(), "size": len(content)}


def lock() -> Lock:
    """A measuring stage, a report on it, and the two stages that say nothing of the state."""
    return {
        "throughput": {
            "cmd": "python stages/throughput.py",
            "deps": [entry("src/engine.py", "code")],
            "params": {
                "params.yaml": {"seed": 7, "throughput": {"lr": 1e-05, "grid": [1, 2]}},
                "outputs/environment.json": {"cpu": "fast"},
            },
            "outs": [
                entry("outputs/throughput/metrics.json", "metrics"),
                entry("outputs/throughput/accum-curve.json", "curve"),
            ],
        },
        "report": {
            "cmd": "python stages/report.py",
            "deps": [entry("outputs/throughput/accum-curve.json", "curve")],
            "outs": [entry("outputs/accum-curve.json", "joined")],
        },
        "environment": {"cmd": "python stages/environment.py", "outs": [entry("outputs/environment.json", "facts")]},
        "track": {"cmd": "python stages/track.py", "deps": [entry("outputs/accum-curve.json", "joined")]},
    }


def written(root: Path, stages: Lock, *, known: list[str] | None = None) -> Pipeline:
    for path, data in (("dvc.lock", stages), ("dvc.yaml", {name: {} for name in known or stages})):
        with (root / path).open("w") as file:
            YAML(typ="safe").dump({"schema": "2.0", "stages": data}, file)
    return read_pipeline(root)


def change(path: str, value: Any) -> Callable[[Lock], None]:
    def apply(stages: Lock) -> None:
        *way, last = path.split("/")
        place: Any = stages
        for step in way:
            place = place[int(step)] if step.isdigit() else place[step]
        place[last] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "other_inputs"),
    [
        ("throughput/cmd", "python other.py", True),
        ("throughput/deps/0/md5", "other code", True),
        ("throughput/params/params.yaml", {"seed": 8}, True),
        ("throughput/params/outputs/environment.json", {"cpu": "slow"}, True),
        ("throughput/outs/0/md5", "other metrics", False),
    ],
)
def test_a_stage_key_changes_with_command_code_params_machine_and_results(
    tmp_path: Path, path: str, value: Any, other_inputs: bool
) -> None:
    stages = lock()
    before = written(tmp_path, stages)
    if path.endswith("environment.json"):
        stages["throughput"]["params"]["outputs/environment.json"] = value
    else:
        change(path, value)(stages)
    after = written(tmp_path, stages)

    old, new = before.stages["throughput"], after.stages["throughput"]
    assert new.key != old.key
    assert (new.inputs != old.inputs) is other_inputs
    assert after.state != before.state
    assert (after.inputs != before.inputs) is other_inputs


def test_results_of_one_stage_are_no_inputs_of_the_pipeline(tmp_path: Path) -> None:
    stages = lock()
    before = written(tmp_path, stages)
    stages["throughput"]["outs"][1] = stages["report"]["deps"][0] = entry("outputs/throughput/accum-curve.json", "new")
    after = written(tmp_path, stages)

    assert after.state != before.state
    assert after.inputs == before.inputs


@pytest.mark.parametrize("stage", ["environment", "track"])
def test_the_state_leaves_out_the_machine_s_facts_and_the_tracker(tmp_path: Path, stage: str) -> None:
    stages = lock()
    before = written(tmp_path, stages)
    stages[stage]["cmd"] = "changed"
    after = written(tmp_path, stages)

    assert (after.state, after.inputs) == (before.state, before.inputs)


def test_a_stage_that_dvc_yaml_no_longer_has_is_left_out(tmp_path: Path) -> None:
    pipeline = written(tmp_path, lock(), known=["throughput", "track"])

    assert sorted(pipeline.stages) == ["throughput", "track"]


def test_params_are_those_of_a_live_run_and_the_machine_s_under_the_name_of_their_file(tmp_path: Path) -> None:
    assert written(tmp_path, lock()).stages["throughput"].flat_params() == {
        "seed": "7",
        "throughput.lr": "1e-05",
        "throughput.grid": "[1, 2]",
        "environment.cpu": "fast",
    }


def test_only_a_stage_with_metrics_and_a_curve_measures(tmp_path: Path) -> None:
    pipeline = written(tmp_path, lock())

    assert [stage.name for stage in pipeline.stages.values() if stage.measures] == ["throughput"]


def test_a_stage_run_on_older_results_is_stale(tmp_path: Path) -> None:
    stages = lock()
    assert written(tmp_path, stages).stale() == []
    stages["throughput"]["outs"][1] = entry("outputs/throughput/accum-curve.json", "new")

    assert written(tmp_path, stages).stale() == ["report"]
    assert "report was run on older results" in written(tmp_path, stages).problems()[0]


def test_files_that_are_missing_or_edited_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = written(tmp_path, lock())
    for path, content in {
        "outputs/throughput/metrics.json": "metrics",
        "outputs/throughput/accum-curve.json": "edited",
    }.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content)

    (problem,) = pipeline.problems()
    assert (
        "outputs/accum-curve.json, outputs/throughput/accum-curve.json: missing, or not as dvc.lock has it" in problem
    )
    assert "outputs/throughput/metrics.json" not in problem


def test_a_folder_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dvc.lock is missing .*Run `dvc repro`"):
        read_pipeline(tmp_path)


def test_of_many_files_that_are_missing_three_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stage = LockedStage("ablation", "a", outs={f"outputs/{i}.csv": "0" for i in range(15)})
    (problem,) = Pipeline({"ablation": stage}).problems()
    assert problem.startswith("outputs/0.csv, outputs/1.csv, outputs/2.csv and 12 more: missing, or not as")


@pytest.mark.parametrize(
    "content",
    [b"stages: [a]", b"stages: {t: 3}", b"stages: {t: {deps: {a: 1}}}", b"stages: {t: {outs: [{md5: 1}]}}", b"a: \xff"],
)
def test_a_lock_of_another_shape_says_how_to_restore_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dvc.lock").write_bytes(content)
    (tmp_path / "dvc.yaml").write_text("stages: {t: {}}")
    with pytest.raises(ConfigError, match=r"Restore it with `git checkout .*dvc\.lock`"):
        read_pipeline(tmp_path)

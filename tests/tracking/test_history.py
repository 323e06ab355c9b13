"""What git and DVC's cache keep of the past, MLflow has again after `gradaccum sync --all`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from gradaccum.errors import ConfigError
from gradaccum.results.outcome import Outcome
from gradaccum.tracking.agreement import agree
from gradaccum.tracking.history import Cache, LeftOut, hindrance
from gradaccum.tracking.lockfile import LockedStage, Pipeline
from gradaccum.tracking.provenance import Origin, here
from gradaccum.tracking.store import Store
from gradaccum.tracking.track import sync_all
from tests.tracking.dvc_project import Project
from tests.tracking.locked import locked

SEEN = ("state", "dvc.exp_names", "dvc.baseline")


@pytest.fixture(scope="module")
def lived(template: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Two commits with results, one that changes none, and in the working folder an experiment on that."""
    root = tmp_path_factory.mktemp("history") / "project"
    shutil.copytree(template.root, root, symlinks=True)
    project = Project(root)
    project.edit("params.yaml", "throughput: {micro_batch: 4", "throughput: {micro_batch: 2")
    project.dvc("repro")
    project.commit("Smaller")
    project.run("git", "commit", "--quiet", "--allow-empty", "--message", "Note", GIT_COMMITTER_DATE="2040-01-01T00:00")
    project.dvc("exp", "run", "--name", "larger", "-S", "throughput.micro_batch=8")
    return project


@pytest.fixture
def lost(lived: Project, tmp_path: Path) -> Project:
    """The same after its database was deleted."""
    shutil.copytree(lived.root, tmp_path / "project", symlinks=True)
    project = Project(tmp_path / "project")
    for path in (*project.root.glob("mlflow.db*"), project.root / "mlartifacts", project.root / ".track"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return project


def seen(runs: list[Run]) -> list[list[str | None]]:
    return [[run.data.tags.get(name) for name in SEEN] for run in runs]


@pytest.mark.e2e
def test_every_commit_s_and_every_experiment_s_run_is_rebuilt_in_their_order_and_once(
    lived: Project, lost: Project
) -> None:
    first, second, third = lost.git("rev-list", "--max-count=3", "--reverse", "HEAD").split()
    experiment = lost.git("for-each-ref", "--format=%(objectname)", f"refs/exps/{third[:2]}/{third[2:]}/larger")

    status = lost.git("status", "--porcelain")

    lost.sync("--all")

    rebuilt = lost.pipeline_runs()
    assert seen(rebuilt) == seen(lived.pipeline_runs())
    assert [run.data.tags["git.commit"] for run in rebuilt] == [first, second, experiment]
    assert [run.info.run_name for run in rebuilt][2] == "larger"
    assert lost.census() == {"equivalence cached": 1, "throughput cached": 3, "pipeline": 3}
    for run in rebuilt:
        curve = lost.client.download_artifacts(run.info.run_id, "accum-curve.json")
        assert Path(curve).read_text().count("samples_per_sec") == 3
        assert lost.client.download_artifacts(run.info.run_id, "figures/throughput.png")

    lost.git("update-ref", f"refs/exps/{second[:2]}/{second[2:]}/same", second)
    assert "of 4 past states, 4 unchanged. Store: " in lost.sync("--all").output
    assert [run.info.run_id for run in lost.pipeline_runs()] == [run.info.run_id for run in rebuilt]
    assert [run.data.tags.get("dvc.exp_names") for run in lost.pipeline_runs()] == [None, "same", "larger"]
    assert lost.git("status", "--porcelain") == status


@pytest.mark.e2e
def test_states_whose_lock_is_broken_or_whose_results_the_cache_lacks_are_counted_and_named_where_asked(
    lost: Project,
) -> None:
    lacking = lost.git("rev-parse", "HEAD~1")
    lock = lost.git("show", "HEAD:dvc.lock")
    curve = re.findall(r"path: outputs/throughput/accum-curve.json\s+hash: md5\s+md5: (\w+)", lock)[0]
    (lost.root / ".dvc/cache/files/md5" / curve[:2] / curve[2:]).unlink()
    whole = (lost.root / "dvc.lock").read_text()
    (lost.root / "dvc.lock").write_text("stages: [")
    lost.commit("Broken")
    broken = lost.git("rev-parse", "HEAD")
    (lost.root / "dvc.lock").write_text(whole)

    short = lost.sync("--all").output.splitlines()

    counted = "of 4 past states, 2 published from the files, 2 left out (1 not in DVC's cache; 1 not readable). Store: "
    assert counted in short[0]
    assert short[1].startswith("Without a remote, only running such a state again brings its run. `gradaccum sync --al")
    assert len(short) == 3
    assert [run.info.run_name for run in lost.pipeline_runs()][1:] == ["larger"]

    (lost.root / ".dvc/config.local").write_text("['remote \"ours\"']\n    url = elsewhere\n")
    named = lost.sync("--all", "-v").output.splitlines()
    assert re.match(rf"{lacking[:7]}: not in DVC's cache: it lacks .*outputs/throughput/accum-curve.json", named[0])
    assert re.match(rf"{broken[:7]}: not readable: dvc.lock is no YAML", named[1])
    assert "`dvc fetch --all-commits` and `dvc exp pull` get what a remote has" in named[3]


def test_a_state_in_which_a_stage_was_run_alone_is_no_whole_one_and_the_stages_behind_are_named() -> None:
    made = LockedStage("throughput", "t", outs={"curve": "new"})
    late = {name: LockedStage(name, "r", deps={"curve": "old"}) for name in ("plan", "report")}
    cache = Cache(None, has_remote=False)

    assert hindrance(cache, Pipeline({"throughput": made, "plan": late["plan"], "report": late["report"]})) == LeftOut(
        "no whole state, as a stage was run alone", "plan, report were run on older results than those beside"
    )
    one = hindrance(cache, Pipeline({"throughput": made, "plan": late["plan"]}))
    assert one
    assert one.why.startswith("plan was run")


def test_a_folder_without_a_pipeline_or_without_git_has_no_past_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"dvc.yaml is missing from .*Run this in the project's root"):
        sync_all(verbose=False)
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    with pytest.raises(ConfigError, match=r"git log failed.*Past states lie in git"):
        sync_all(verbose=False)


def test_a_past_state_that_is_published_late_supersedes_nothing_and_is_superseded_by_what_came_after(
    store: Store, client: MlflowClient, outcome: Outcome
) -> None:
    agree(store, locked(outcome), here())
    (current,) = finished(client, store.name)
    (stage,) = finished(client, store.stages_name)
    earlier = locked(Outcome({"peak_samples_per_sec": 1.0}, outcome.curve, []))

    for _ in range(2):
        agree(store, earlier, Origin("0123456", dirty=False, committed_ms=1_000))

    for name, last in ((store.name, current), (store.stages_name, stage)):
        by_id = {run.info.run_id: run for run in finished(client, name)}
        assert "superseded" not in by_id.pop(last.info.run_id).data.tags
        (old,) = by_id.values()
        assert old.data.tags["superseded"] == last.info.run_id
        assert (old.info.start_time, old.info.end_time) == (1_000, 1_000)


def finished(client: MlflowClient, name: str) -> list[Run]:
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], "attributes.status = 'FINISHED'"))

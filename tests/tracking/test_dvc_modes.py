"""Whatever way DVC runs the pipeline, MLflow has one run a stage key and one a pipeline state, beside the project."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tracking.dvc_project import Project, wait_until

pytestmark = pytest.mark.e2e

FIRST = {"equivalence": 1, "throughput": 1, "pipeline": 1}


def assert_artifacts_open(project: Project) -> None:
    client = project.client
    for run in project.stage_runs():
        if run.info.status == "FINISHED":
            assert Path(client.download_artifacts(run.info.run_id, "accum-curve.json")).stat().st_size
    for run in project.pipeline_runs():
        for name in ("accum-curve.json", "figures/throughput.png", "dvc.lock", "params.yaml"):
            assert Path(client.download_artifacts(run.info.run_id, name)).stat().st_size


def test_repro_makes_one_run_a_stage_and_one_of_the_pipeline(project: Project) -> None:
    assert project.census() == FIRST
    assert_artifacts_open(project)
    (run,) = project.pipeline_runs()
    stages = {stage.data.tags["stage"]: stage for stage in project.stage_runs()}
    assert run.data.params == {
        "seed": "7",
        "equivalence.fail": "false",
        "equivalence.micro_batch": "4",
        "throughput.fail": "false",
        "throughput.micro_batch": "4",
    }
    assert run.data.metrics["throughput/peak"] == stages["throughput"].data.metrics["peak"]
    curve = project.client.get_metric_history(run.info.run_id, "throughput/sgd/samples_per_sec")
    assert [sample.step for sample in sorted(curve, key=lambda sample: sample.timestamp)] == [4, 8, 16]
    for name, stage in stages.items():
        assert run.data.tags[f"stage_run.{name}"] == stage.info.run_id
    assert not [name for name in run.data.tags if "finite" in name]


def test_repro_with_nothing_changed_adds_nothing(template: Project) -> None:
    done = template.dvc("repro")

    assert "nothing new" in done.stdout
    assert template.census() == FIRST


def test_an_experiment_adds_what_it_ran_and_the_same_again_only_its_name(project: Project) -> None:
    project.dvc("exp", "run", "--name", "first", "-S", "throughput.micro_batch=8")
    assert project.census() == {"equivalence": 1, "throughput": 2, "pipeline": 2}
    assert project.pipeline_runs()[1].info.run_name == "first"

    project.git("reset", "--quiet", "--hard")
    project.dvc("checkout", "--force")
    project.dvc("exp", "run", "--name", "again", "-S", "throughput.micro_batch=8")

    assert project.census() == {"equivalence": 1, "throughput": 2, "pipeline": 2}
    assert project.pipeline_runs()[1].data.tags["dvc.exp_names"] == "first, again"
    assert_artifacts_open(project)

    project.git("reset", "--quiet", "--hard")
    project.dvc("exp", "apply", "first")
    project.dvc("repro")
    assert project.census() == {"equivalence": 1, "throughput": 2, "pipeline": 2}


def test_a_temporary_experiment_is_tracked_in_the_main_repository(project: Project) -> None:
    project.dvc("exp", "run", "--temp", "--name", "aside", "-S", "throughput.micro_batch=8")

    assert project.census() == {"equivalence": 1, "throughput": 2, "pipeline": 2}
    assert project.pipeline_runs()[1].data.tags["dvc.exp_names"] == "aside"
    assert not [run for run in project.stage_runs() if "dvc.cached" in run.data.tags]
    assert_artifacts_open(project)


def test_queued_experiments_each_run_their_own_code_and_are_tracked_in_the_main_repository(project: Project) -> None:
    project.dvc("exp", "run", "--queue", "--name", "before", "-S", "throughput.micro_batch=8")
    project.edit("stages/measure.py", "VERSION = 1", "VERSION = 2")
    project.dvc("exp", "run", "--queue", "--name", "after", "-S", "throughput.micro_batch=8")
    project.edit("stages/measure.py", "VERSION = 2", "VERSION = 3")
    project.dvc("queue", "start", "-j", "2")
    try:
        wait_until(lambda: len(project.git("for-each-ref", "refs/exps/").splitlines()) >= 2 + _executing(project))
    finally:
        project.dvc("queue", "stop", "--kill", check=False)

    versions = {run.info.run_name: run.data.metrics["throughput/version"] for run in project.pipeline_runs()[1:]}
    assert versions == {"before": 1.0, "after": 2.0}
    assert project.census() == {"equivalence": 2, "throughput": 3, "pipeline": 3}
    assert_artifacts_open(project)


def _executing(project: Project) -> int:
    """References that DVC keeps of a queue, beside those of finished experiments."""
    names = project.git("for-each-ref", "--format", "%(refname)", "refs/exps/").splitlines()
    return len([name for name in names if name.split("/")[2] in ("stash", "exec", "celery", "apply", "temp", "push")])


def test_a_stage_run_alone_is_claimed_with_the_rest_and_an_older_commit_finds_its_runs(project: Project) -> None:
    project.edit("params.yaml", "throughput: {micro_batch: 4", "throughput: {micro_batch: 2")
    project.dvc("repro", "throughput")
    assert project.census() == {"equivalence": 1, "throughput": 2, "pipeline": 1}

    project.dvc("repro")

    assert project.census() == {"equivalence": 1, "throughput": 2, "pipeline": 2}
    assert all("stage_key" in run.data.tags for run in project.stage_runs())

    project.commit("Two at once")
    project.git("checkout", "--quiet", "HEAD~1")
    project.dvc("checkout")

    project.dvc("repro")

    assert project.census() == {"equivalence": 1, "throughput": 2, "pipeline": 2}


def test_a_forced_repetition_supersedes_what_it_changed_and_repeats_nothing_else(project: Project) -> None:
    old_stage = next(run for run in project.stage_runs() if run.data.tags["stage"] == "throughput")
    (old,) = project.pipeline_runs()

    project.dvc("repro", "--force")

    assert project.census() == {"equivalence": 1, "throughput": 2, "pipeline": 2}
    new = project.pipeline_runs()[1]
    client = project.client
    assert client.get_run(old.info.run_id).data.tags["superseded"] == new.info.run_id
    assert client.get_run(old_stage.info.run_id).data.tags["superseded"] == new.data.tags["stage_run.throughput"]
    assert "superseded" not in new.data.tags

    project.git("reset", "--quiet", "--hard")
    project.dvc("checkout")
    project.dvc("repro")

    assert project.census() == {"equivalence": 1, "throughput": 2, "pipeline": 2}
    for run in (old, old_stage):
        assert "superseded" not in client.get_run(run.info.run_id).data.tags
    assert client.get_run(new.info.run_id).data.tags["superseded"] == old.info.run_id


def test_a_stage_that_raises_leaves_a_failed_run_and_no_pipeline_run(project: Project) -> None:
    failed = project.dvc("exp", "run", "-S", "throughput.fail=true", check=False)

    assert failed.returncode != 0
    assert project.census() == {"equivalence": 1, "throughput": 1, "throughput FAILED": 1, "pipeline": 1}


def test_what_ran_before_a_stage_that_raises_in_a_temporary_experiment_is_claimed_later(project: Project) -> None:
    changes = ("-S", "seed=8", "-S", "throughput.micro_batch=2")
    failed = project.dvc("exp", "run", "--temp", *changes, "-S", "throughput.fail=true", check=False)

    assert failed.returncode != 0
    assert project.census() == {"equivalence": 2, "throughput": 1, "throughput FAILED": 1, "pipeline": 1}

    project.git("reset", "--quiet", "--hard")
    project.dvc("checkout", "--force")
    project.dvc("exp", "run", *changes)

    assert project.census() == {"equivalence": 2, "throughput": 2, "throughput FAILED": 1, "pipeline": 2}


def test_a_deleted_database_is_rebuilt_from_the_files_though_nothing_runs(project: Project) -> None:
    for path in (*project.root.glob("mlflow.db*"), project.root / "mlartifacts"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    done = project.dvc("repro")

    assert "Running stage 'throughput'" not in done.stdout
    assert project.census() == {"equivalence cached": 1, "throughput cached": 1, "pipeline": 1}
    assert_artifacts_open(project)
    assert project.stage_runs()[0].data.params["seed"] == "7"


def test_a_colleague_rebuilds_the_runs_after_git_clone_and_dvc_pull(project: Project, tmp_path: Path) -> None:
    project.dvc("remote", "add", "--default", "storage", str(tmp_path / "storage"))
    project.commit("Add a remote")
    project.dvc("push")
    project.git("clone", "--quiet", str(project.root), str(tmp_path / "colleague"))
    colleague = Project(tmp_path / "colleague")

    before = colleague.sync(check=False)
    assert before.exit_code == 1
    assert "dvc pull" in before.stderr

    colleague.dvc("pull")
    colleague.sync()

    assert colleague.census() == {"equivalence cached": 1, "throughput cached": 1, "pipeline": 1}
    assert_artifacts_open(colleague)
    assert project.pipeline_runs()[0].data.tags["state"] == colleague.pipeline_runs()[0].data.tags["state"]


def test_runs_of_a_moved_repository_stay_and_the_next_join_them(project: Project, tmp_path: Path) -> None:
    moved = Project(tmp_path / "moved")
    project.root.rename(moved.root)

    moved.sync()

    assert moved.census() == FIRST
    assert_artifacts_open(moved)

"""One stage's live run: what it holds, and how it ends."""

from __future__ import annotations

import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from gradaccum.results.curve import Curve
from gradaccum.results.files import write_outcome
from gradaccum.results.outcome import Outcome, StepSeries
from gradaccum.tracking.stage_run import stage_run
from gradaccum.tracking.store import Store
from tests.tracking.reading import history, only_run, runs

PARAMS = {"seed": 7, "throughput": {"accum_steps": [1, 2], "micro_batch": 4, "nested": {"on": True, "none": None}}}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, list[Any]]]:
    """What `log_batch` was called with, in the order of the calls."""
    made: list[dict[str, list[Any]]] = []
    original = MlflowClient.log_batch

    def noted(self: MlflowClient, run_id: str, **kwargs: Any) -> Any:
        made.append(kwargs)
        return original(self, run_id, **kwargs)

    monkeypatch.setattr(MlflowClient, "log_batch", noted)
    return made


def test_a_run_holds_params_headline_curve_series_files_and_figures(
    client: MlflowClient, store: Store, outcome: Outcome
) -> None:
    with stage_run("throughput", PARAMS) as run:
        run.log(outcome, artifacts=write_outcome(outcome), figures={"throughput.png": b"\x89PNG"})

    logged = only_run(client, store)
    assert logged.info.status == "FINISHED"
    assert logged.data.params == {
        "seed": "7",
        "throughput.accum_steps": "[1, 2]",
        "throughput.micro_batch": "4",
        "throughput.nested.on": "true",
        "throughput.nested.none": "null",
    }
    assert logged.data.metrics["peak_samples_per_sec"] == 400.0
    assert logged.data.metrics["flattens"] == 1.0
    assert history(client, logged, "sgd/samples_per_sec") == [(4, 100.0), (8, 200.0), (16, 400.0)]
    assert history(client, logged, "sgd/kink") == [(4, 0.0), (8, 1.0), (16, 0.0)]
    assert history(client, logged, "naive/loss N_2") == [(1, 2.5)]
    assert "sgd/note" not in logged.data.metrics
    assert {item.path for item in client.list_artifacts(logged.info.run_id)} == {
        "accum-curve.json",
        "figures",
        "metrics.json",
    }
    figure = client.download_artifacts(logged.info.run_id, "figures/throughput.png")
    assert Path(figure).read_bytes() == b"\x89PNG"


def test_what_was_not_finite_is_one_tag_and_what_there_is_none_of_is_no_news(
    client: MlflowClient, store: Store, outcome: Outcome
) -> None:
    metrics = {**outcome.metrics, "ratio": float("inf")}
    with stage_run("throughput", {}) as run:
        run.log(Outcome(metrics, outcome.curve, [], series=outcome.series))

    told = {name: text for name, text in only_run(client, store).data.tags.items() if "finite" in name}
    assert told == {"not_finite": "ratio: inf at step 0; naive/loss N_2: null at step 2 to 3 (2 values)"}


def test_more_lines_that_diverged_than_a_tag_holds_are_cut_with_a_mark(
    client: MlflowClient, store: Store, outcome: Outcome
) -> None:
    series = [StepSeries(f"arm{i:03}/loss", (1,), (None,)) for i in range(300)]
    with stage_run("throughput", {}) as run:
        run.log(Outcome({}, outcome.curve, [], series=series))

    told = only_run(client, store).data.tags["not_finite"]
    assert len(told) == 5000
    assert told.startswith("arm000/loss: null at step 1; arm001/loss: null")
    assert told.endswith(" ...")


def test_the_description_says_what_the_stage_asks_and_what_it_found_broken_claims_first(
    client: MlflowClient, store: Store, outcome: Outcome
) -> None:
    Path("dvc.yaml").write_text("stages: {throughput: {desc: What does it cost?}}")
    findings = [f"finding {i}" for i in range(9)]
    with stage_run("throughput", {}) as run:
        run.log(Outcome({}, outcome.curve, [], findings=findings, failures=["It fell."]))

    described = only_run(client, store).data.tags["mlflow.note.content"]
    assert described == "What does it cost?\n\n- It fell.\n- finding 0\n- finding 1\n- finding 2"


def test_a_headline_that_is_the_end_of_a_line_adds_no_point_to_it(
    client: MlflowClient, store: Store, outcome: Outcome
) -> None:
    metrics = {"sgd/samples_per_sec": 400.0, "sgd/kink": 7}
    with stage_run("throughput", {}) as run:
        run.log(Outcome(metrics, outcome.curve, []))

    logged = only_run(client, store)
    assert history(client, logged, "sgd/samples_per_sec") == [(4, 100.0), (8, 200.0), (16, 400.0)]
    assert logged.data.metrics["sgd/samples_per_sec"] == 400.0
    assert "sgd/samples_per_sec/headline" not in logged.data.metrics
    assert history(client, logged, "sgd/kink") == [(4, 0.0), (8, 1.0), (16, 0.0)]
    assert logged.data.metrics["sgd/kink/headline"] == 7.0


def test_a_field_that_is_nowhere_a_number_is_no_metric(client: MlflowClient, store: Store) -> None:
    shared = {"accum_steps": 2, "effective_batch": 8, "micro_batch": 4, "world_size": 1, "cut": None}
    points = ({"series": "right", **shared, "loss": 1.0}, {"series": "wrong", **shared, "loss": None})
    with stage_run("ablation", {}) as run:
        run.log(Outcome({"right/cut": None}, Curve("ablation", "accum_steps", points), []))

    logged = only_run(client, store)
    assert logged.data.metrics == {"right/loss": 1.0}


def test_time_stamps_rise_with_x(client: MlflowClient, store: Store, outcome: Outcome) -> None:
    with stage_run("throughput", {}) as run:
        run.log(outcome)

    samples = client.get_metric_history(only_run(client, store).info.run_id, "sgd/samples_per_sec")
    by_x = sorted(samples, key=lambda sample: sample.step)
    assert all(left.timestamp < right.timestamp for left, right in pairwise(by_x))


def test_more_than_mlflow_takes_in_one_call_is_logged_whole(
    client: MlflowClient, store: Store, calls: list[dict[str, list[Any]]]
) -> None:
    series = [StepSeries(f"loss/{i}", range(700), [0.5] * 700) for i in range(3)]
    with stage_run("ablation", {f"key{i}": i for i in range(230)}) as run:
        run.log(Outcome({}, Curve("ablation", "accum_steps"), [], series=series))

    logged = only_run(client, store)
    assert len(logged.data.params) == 230
    assert [len(history(client, logged, f"loss/{i}")) for i in range(3)] == [700, 700, 700]
    sizes = [(kind, len(items)) for call in calls for kind, items in call.items()]
    assert sizes == [
        *[("params", 100), ("params", 100), ("params", 30)],
        *[("metrics", 1000), ("metrics", 1000), ("metrics", 100), ("tags", 1)],
    ]


def test_a_param_over_the_length_limit_is_cut_with_a_mark_and_kept_whole_as_a_file(
    client: MlflowClient, store: Store
) -> None:
    long = list(range(3000))
    with stage_run("throughput", {"grid": long, "short": "x"}):
        pass

    logged = only_run(client, store)
    assert len(logged.data.params["grid"]) == 6000
    assert logged.data.params["grid"].endswith(" ... cut, whole in params/grid.txt")
    assert Path(client.download_artifacts(logged.info.run_id, "params/grid.txt")).read_text() == str(long)


def test_tags_tell_where_the_run_comes_from(
    client: MlflowClient, store: Store, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = _commit_all(repository)
    monkeypatch.setenv("DVC_EXP_NAME", "brave-fox")
    monkeypatch.setenv("DVC_EXP_BASELINE_REV", commit)
    with stage_run("throughput", PARAMS):
        pass

    logged = only_run(client, store)
    tags = logged.data.tags
    assert logged.info.run_name == "throughput brave-fox"
    assert (tags["stage"], tags["dvc.exp_name"], tags["dvc.baseline"]) == ("throughput", "brave-fox", commit)
    assert (tags["git.commit"], tags["git.dirty"]) == (commit, "false")
    assert tags["process.pid"] == str(os.getpid())
    assert "mlflow.parentRunId" not in tags


def test_an_edited_file_makes_the_run_dirty_and_a_result_does_not(
    client: MlflowClient, store: Store, repository: Path
) -> None:
    commit = _commit_all(repository)
    for edited in ("outputs/metrics.json", "dvc.lock", "params.yaml"):
        (repository / edited).write_text("edited")
        with stage_run("throughput", {}):
            pass

    logged = runs(client, store)
    assert [run.data.tags["git.dirty"] for run in logged] == ["false", "false", "true"]
    assert logged[0].info.run_name.startswith(f"throughput {commit[:7]}-")


def test_runs_of_one_commit_with_different_params_have_different_names(client: MlflowClient, store: Store) -> None:
    for micro_batch in (4, 8):
        with stage_run("throughput", {"micro_batch": micro_batch}):
            pass

    assert len({run.info.run_name for run in runs(client, store)}) == 2


@pytest.mark.usefixtures("repository")
def test_a_stage_is_logged_in_a_handful_of_calls(outcome: Outcome, calls: list[dict[str, list[Any]]]) -> None:
    series = [StepSeries(f"line{i}", range(200), [1.0] * 200) for i in range(4)]
    with stage_run("throughput", {f"key{i}": i for i in range(20)}) as run:
        run.log(Outcome(outcome.metrics, outcome.curve, [], series=series))

    assert [next(iter(call)) for call in calls] == ["params", "metrics", "tags"]


def _commit_all(repository: Path) -> str:
    for name in ("outputs/metrics.json", "dvc.lock", "params.yaml"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("committed")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "outputs", "dvc.lock", "params.yaml"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=repository, check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()

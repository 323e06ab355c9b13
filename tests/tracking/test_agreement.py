"""Agreement in one process: what `track` finds, what it makes, and what it must never do."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock, Timeout
from mlflow import MlflowClient

from gradaccum.errors import ClaimError
from gradaccum.results.curve import Curve
from gradaccum.results.files import write_outcome
from gradaccum.results.outcome import Outcome
from gradaccum.tracking import publication
from gradaccum.tracking import track as track_module
from gradaccum.tracking.agreement import LIVE, PUBLISHED, UNCHANGED, Agreeing, Agreement, agree
from gradaccum.tracking.journal import Journal
from gradaccum.tracking.lockfile import Pipeline
from gradaccum.tracking.memory import forget_runs, has_unclaimed_runs, is_published
from gradaccum.tracking.patience import TrackingError
from gradaccum.tracking.provenance import here
from gradaccum.tracking.stage_run import stage_run
from gradaccum.tracking.store import Store
from gradaccum.tracking.track import sync, track
from tests.tracking.dvc_project import Project
from tests.tracking.locked import PARAMS, locked
from tests.tracking.reading import history


@pytest.fixture
def pipeline(repository: Path, outcome: Outcome) -> Pipeline:
    """A measured stage and a report, as DVC would have locked them, with their files in the working folder."""
    return locked(outcome)


def counts(store: Store, client: MlflowClient) -> tuple[int, int]:
    """How many finished runs there are, of stages and of the pipeline."""
    return tuple(len(runs(store, client, name)) for name in (store.stages_name, store.name))  # type: ignore[return-value]


def runs(store: Store, client: MlflowClient, name: str) -> list:  # type: ignore[type-arg]
    experiment = client.get_experiment_by_name(name)
    return list(client.search_runs([experiment.experiment_id], "attributes.status = 'FINISHED'")) if experiment else []


def measured(outcome: Outcome, params: dict[str, object] = PARAMS) -> str:
    """The id of a live run that ends well."""
    with stage_run("throughput", params) as run:
        run.log(outcome, artifacts=write_outcome(outcome))
    return run.run_id


def test_agreeing_twice_adds_nothing(store: Store, client: MlflowClient, pipeline: Pipeline) -> None:
    first = agree(store, pipeline, here())
    second = agree(store, pipeline, here())

    assert first.runs == {"throughput": PUBLISHED, "pipeline": PUBLISHED}
    assert str(first) == "published from the files: throughput, pipeline"
    assert str(second) == "unchanged: throughput, pipeline"
    assert counts(store, client) == (1, 1)


def test_the_live_run_with_these_results_is_claimed_and_another_is_not(
    store: Store, client: MlflowClient, outcome: Outcome
) -> None:
    other = Outcome({"peak_samples_per_sec": 1.0}, outcome.curve, [])
    measured(other)
    run_id = measured(outcome)
    pipeline = locked(outcome)

    assert agree(store, pipeline, here()).runs["throughput"] == LIVE
    (claimed,) = [run for run in runs(store, client, store.stages_name) if "stage_key" in run.data.tags]
    assert claimed.info.run_id == run_id


@pytest.mark.parametrize("published", [False, True])
def test_a_stage_forced_several_times_before_track_leaves_one_run(
    store: Store, client: MlflowClient, outcome: Outcome, published: bool
) -> None:
    if published:
        agree(store, locked(outcome), here())
    for _ in range(3):
        run_id = measured(outcome)

    assert agree(store, locked(outcome), here()).runs["throughput"] == ("unchanged" if published else "logged live")
    (only,) = runs(store, client, store.stages_name)
    assert "stage_key" in only.data.tags
    assert (only.info.run_id == run_id) is not published
    assert not has_unclaimed_runs()


def test_a_repetition_is_no_run_of_other_params_or_of_another_folder(
    store: Store, client: MlflowClient, outcome: Outcome
) -> None:
    for params, forgotten in (({**PARAMS, "seed": 8}, False), (PARAMS, True), (PARAMS, False)):
        measured(outcome, params)
        if forgotten:
            forget_runs()

    assert agree(store, locked(outcome), here()).runs["throughput"] == "logged live"
    assert len(runs(store, client, store.stages_name)) == 3


def test_a_live_run_of_other_params_is_not_claimed_though_its_results_are_equal(
    store: Store, client: MlflowClient, outcome: Outcome
) -> None:
    measured(outcome)

    assert agree(store, locked(outcome, seed=8), here()).runs["throughput"] == PUBLISHED


def test_the_run_of_a_stage_that_failed_is_not_claimed_though_its_results_are_these(
    store: Store, client: MlflowClient, outcome: Outcome
) -> None:
    def stage() -> None:
        with stage_run("throughput", PARAMS) as run:
            run.log(outcome, artifacts=write_outcome(outcome))
            raise ClaimError("throughput fell")

    with pytest.raises(ClaimError):
        stage()

    assert agree(store, locked(outcome), here()).runs["throughput"] == PUBLISHED


def test_a_run_half_made_is_never_taken_for_done(
    store: Store, client: MlflowClient, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(publication, "_files", lambda pipeline: {"missing": Path("missing")})
        with pytest.raises(FileNotFoundError):
            agree(store, pipeline, here())
    assert counts(store, client) == (1, 0)

    assert agree(store, pipeline, here()).runs == {"throughput": UNCHANGED, "pipeline": PUBLISHED}
    assert counts(store, client) == (1, 1)


def test_going_back_to_earlier_results_makes_their_runs_the_current_ones_again(
    store: Store, client: MlflowClient, outcome: Outcome
) -> None:
    other = Outcome({"peak_samples_per_sec": 1.0}, outcome.curve, [])
    for made in (outcome, other, outcome):
        agree(store, locked(made), here())

    for name in (store.name, store.stages_name):
        later, earlier = runs(store, client, name)
        assert "superseded" not in earlier.data.tags
        assert later.data.tags["superseded"] == earlier.info.run_id


@pytest.mark.parametrize("mark", ["stage_key", "state"])
def test_the_tag_that_identifies_a_run_is_set_last(
    store: Store, client: MlflowClient, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    calls: list[tuple[str, str]] = []
    for name in ("params", "measured", "files", "tags", "end"):
        original = getattr(Journal, name)

        def spied(self: Journal, given: object, *, name: str = name, original: object = original, **at: object) -> None:
            calls.append((self.run_id, f"{name} {sorted(given)}" if isinstance(given, dict) else name))
            original(self, given, **at)  # type: ignore[operator]

        monkeypatch.setattr(Journal, name, spied)
    agree(store, pipeline, here())

    (run_id,) = {run for run, call in calls if call == f"tags {[mark]}"}
    made = [call for run, call in calls if run == run_id]
    assert made.index(f"tags {[mark]}") == len(made) - 1


def test_a_stage_whose_files_are_not_those_of_the_lock_is_not_published(
    store: Store, client: MlflowClient, pipeline: Pipeline
) -> None:
    Path("outputs/throughput/metrics.json").write_text("{}")

    agreement = agree(store, pipeline, here())

    assert agreement.runs == {}
    assert "outputs/throughput/metrics.json: missing, or not as dvc.lock has it" in agreement.problems[0]
    assert counts(store, client) == (0, 0)


def test_a_curve_of_text_and_nulls_is_published(store: Store, client: MlflowClient) -> None:
    point = {"series": "sgd", "effective_batch": 4, "accum_steps": 4, "micro_batch": None, "cut": [3, 1]}
    points = [
        point | {"world_size": 1, "loss": None, "note": "n"},
        point | {"world_size": 1, "loss": 1.5, "note": None},
    ]
    agree(store, locked(Outcome({}, Curve("throughput", "accum_steps", tuple(points)), [])), here())

    (run,) = runs(store, client, store.name)
    assert run.data.metrics == {"throughput/sgd/loss": 1.5}
    assert not [name for name in run.data.tags if "finite" in name]


def test_a_state_s_description_has_the_first_finding_of_each_stage_or_where_that_is_gone_its_first_number(
    store: Store, client: MlflowClient, outcome: Outcome
) -> None:
    Path("dvc.yaml").write_text("stages: {throughput: {desc: What does it cost?}}")
    found = replace(outcome, findings=["It costs 3.", "It flattens."])
    with stage_run("throughput", PARAMS) as run:
        run.log(found, artifacts=write_outcome(found))
    agree(store, locked(found), here())
    other = replace(outcome, metrics={"none": None, "peak": 1.23456})
    agree(store, locked(other), here())

    notes = [run.data.tags["mlflow.note.content"] for run in reversed(runs(store, client, store.name))]
    assert notes == ["- throughput: What does it cost? It costs 3.", "- throughput: What does it cost? peak: 1.235"]


def test_a_run_made_from_files_has_the_curves_over_steps_that_its_tables_hold(
    store: Store, client: MlflowClient, outcome: Outcome
) -> None:
    losses = [{"series": "sgd", "accum_steps": 2, "step": step, "loss": 1 / step} for step in (1, 2)]
    other_columns = [{"series": "sgd", "samples": 8}]
    agree(store, locked(replace(outcome, tables={"losses": losses, "learning": other_columns})), here())

    (run,) = runs(store, client, store.stages_name)
    assert history(client, run, "sgd/loss/n2") == [(1, 1.0), (2, 0.5)]


def test_nothing_new_imports_neither_mlflow_nor_torch(template: Project) -> None:
    script = (
        "import sys\nfrom gradaccum.tracking.track import track\ntrack()\n"
        "print([name for name in ('mlflow', 'torch') if name in sys.modules])"
    )
    done = template.run(sys.executable, "-c", script)

    assert "nothing new" in done.stdout
    assert done.stdout.endswith("[]\n")


@pytest.mark.usefixtures("repository")
def test_track_does_not_fail_the_pipeline_unless_strict(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    track()
    assert "dvc.lock is missing" in caplog.text

    monkeypatch.setenv("GRADACCUM_TRACKING", "strict")
    with pytest.raises(TrackingError, match=r"dvc\.lock is missing"):
        track()


def test_a_run_that_was_deleted_in_the_ui_is_missed_though_another_experiment_has_its_state(
    store: Store, client: MlflowClient, pipeline: Pipeline
) -> None:
    agree(replace(store, name="other"), pipeline, here())
    agree(store, pipeline, here())
    assert is_published(store, pipeline.state, "")
    (run,) = runs(store, client, store.name)

    client.delete_run(run.info.run_id)

    assert not is_published(store, pipeline.state, "")


def test_track_warns_once_of_a_store_that_is_down_and_sync_fails(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(track_module, "read_pipeline", lambda: pipeline)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    track()
    assert len(caplog.records) == 1

    with pytest.raises(TrackingError, match="could not take the pipeline's state"):
        sync()


def test_one_process_at_a_time_agrees_so_that_two_publish_one_run(
    store: Store, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Agreeing.agree

    def watched(self: Agreeing) -> Agreement:
        with pytest.raises(Timeout):
            FileLock(store.root / ".track" / "agree.lock").acquire(timeout=0)
        return original(self)

    monkeypatch.setattr(Agreeing, "agree", watched)

    assert agree(store, pipeline, here()).runs["pipeline"] == PUBLISHED

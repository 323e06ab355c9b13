"""The real pipeline, run by DVC in a clone and tracked on a team's server; then README's commands, run in it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from gradaccum.tracking.client import open_client
from gradaccum.tracking.lockfile import read_pipeline
from gradaccum.tracking.store import locate
from tests.e2e.clone import Clone, clone_working_tree
from tests.e2e.readme import COMMANDS, FILES
from tests.tracking.faulty_proxy import faulty_proxy
from tests.tracking.serving import real_server

pytestmark = [pytest.mark.e2e, pytest.mark.server]

MEASURING = ("equivalence", "ablation", "throughput", "memory", "plan", "efficiency", "scaling", "distributed")
PASSWORD = secrets.token_hex(8)  # nowhere in the files that are cloned


@dataclass(frozen=True)
class Repro:
    """A clone after its first `dvc repro`, and what that said."""

    clone: Clone
    output: str


@pytest.fixture(scope="module")
def _team_server() -> Iterator[None]:
    """A server to which every process started here logs in."""
    with real_server() as address, faulty_proxy(address) as proxy, pytest.MonkeyPatch.context() as patch:
        proxy.credentials = f"ann:{PASSWORD}"
        for name, value in (("URI", proxy.address), ("USERNAME", "ann"), ("PASSWORD", PASSWORD)):
            patch.setenv(f"MLFLOW_TRACKING_{name}", value)
        patch.setenv("GRADACCUM_TRACKING", "strict")
        yield


@pytest.fixture(scope="module")
def repro(tmp_path_factory: pytest.TempPathFactory, _team_server: None) -> Repro:
    made = clone_working_tree(tmp_path_factory.mktemp("clone"))
    done = made.run("dvc", "repro")
    made.commit("Run")
    return Repro(made, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def clone(repro: Repro) -> Clone:
    return repro.clone


@pytest.fixture(scope="module")
def said(clone: Clone) -> dict[str, str]:
    """What each command of README prints, pasted one after the other into the clone that has run once."""
    clone.take_environment()
    clone.git("reset", "--quiet", "--soft", "HEAD~1")  # README commits what the first repro measured
    for name, block in FILES.items():
        (clone.root / name).write_text(block)
    printed = clone.script(*COMMANDS, GRADACCUM_TRACKING="strict")
    clone.restore()
    return printed


@pytest.fixture
def unchanged(clone: Clone) -> Iterator[Clone]:
    """The clone, put back afterwards to what was committed."""
    yield clone
    clone.restore()


def stages_run(output: str) -> list[str]:
    return re.findall(r"Running stage '(\w+)'", output)


def runs(clone: Clone, stage: str) -> tuple[MlflowClient, list[Run]]:
    """The stage's runs as the server has them, and a client to read more with."""
    return found(clone, locate(clone.root).stages_name, f"tags.stage = '{stage}'")


def found(clone: Clone, name: str, condition: str = "") -> tuple[MlflowClient, list[Run]]:
    client = open_client(locate(clone.root))
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    return client, list(client.search_runs([experiment.experiment_id], condition))


def test_a_repro_writes_every_file_and_leaves_dvc_clean(clone: Clone) -> None:
    for stage in MEASURING:
        assert clone.json(f"outputs/{stage}/metrics.json")
        curve = clone.json(f"outputs/{stage}/accum-curve.json")
        assert (curve["schema"], curve["stage"]) == ("accum-curve.v1", stage)
    assert clone.json("outputs/equivalence/metrics.json")["equivalent"] is True
    joined = clone.json("outputs/accum-curve.json")["points"]
    assert {"avg_loss", "samples_per_sec", "median_step_ms", "sync_calls", "steps"} <= joined[0].keys()
    assert "equivalence/max_grad_diff" in joined[0]
    assert (clone.root / "outputs/report/throughput.png").is_file()
    status = clone.run("dvc", "status").stdout
    assert set(re.findall(r"^(\w+):", status, re.MULTILINE)) <= {"environment", "track"}
    assert "modified" not in status
    assert clone.git("status", "--porcelain") == ""


@pytest.mark.parametrize("stage", MEASURING)
def test_each_stage_is_a_finished_run_with_its_curve_and_artifacts(clone: Clone, stage: str) -> None:
    client, found = runs(clone, stage)
    assert [run.info.status for run in found] == ["FINISHED"]
    (run,) = found
    for name, value in clone.json(f"outputs/{stage}/metrics.json").items():
        assert value is None or run.data.metrics[name] == value, name
    artifacts = {entry.path for entry in client.list_artifacts(run.info.run_id)}
    assert {"accum-curve.json", "metrics.json", "figures"} <= artifacts
    assert any(name.startswith(f"{stage}.") for name in run.data.params)


def test_the_pipeline_is_one_run_on_the_server_with_all_params_metrics_curves_and_files(
    clone: Clone, tmp_path: Path
) -> None:
    pipeline = read_pipeline(clone.root)
    client, (run,) = found(clone, locate(clone.root).name, f"tags.state = '{pipeline.state}'")
    assert run.info.status == "FINISHED"
    stages = {stage: runs(clone, stage)[1][0] for stage in MEASURING}
    for name, stage in stages.items():
        assert run.data.tags[f"stage_run.{name}"] == stage.info.run_id
        assert stage.data.params.items() <= run.data.params.items()
        heads = {f"{name}/{head}": value for head, value in clone.json(f"outputs/{name}/metrics.json").items()}
        assert {head: run.data.metrics.get(head) for head in heads} == heads
    curve = clone.json("outputs/throughput/accum-curve.json")["points"]
    history = client.get_metric_history(run.info.run_id, "throughput/sgd/median_step_ms")
    assert [(each.step, each.value) for each in history] == [(p["effective_batch"], p["median_step_ms"]) for p in curve]
    files = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    for name in ("accum-curve.json", "skill-gradient-accumulation.md"):
        assert (files / name).read_bytes() == (clone.root / "outputs" / name).read_bytes()
    assert (files / "params.yaml").read_bytes() == (clone.root / "params.yaml").read_bytes()
    assert read_pipeline(files_with_pipeline(files, clone)).state == pipeline.state
    figures = {path.name for path in (clone.root / "outputs/report").glob("*.png")}
    assert figures
    assert {path.name for path in (files / "figures").iterdir()} == figures


def files_with_pipeline(files: Path, clone: Clone) -> Path:
    (files / "dvc.yaml").write_bytes((clone.root / "dvc.yaml").read_bytes())
    return files


def test_nothing_is_running_on_the_server_and_nothing_of_mlflow_s_is_here(clone: Clone) -> None:
    for name in (locate(clone.root).name, locate(clone.root).stages_name):
        assert found(clone, name, "attributes.status = 'RUNNING'")[1] == []
    assert not (clone.root / "mlflow.db").exists()
    assert not (clone.root / "mlartifacts").exists()


def test_the_password_is_nowhere(repro: Repro) -> None:
    names = (locate(repro.clone.root).name, locate(repro.clone.root).stages_name)
    logged = [str(run.data) for name in names for run in found(repro.clone, name)[1]]
    assert len(logged) > len(MEASURING)
    written = [path.read_bytes() for path in repro.clone.root.rglob("*") if path.is_file()]
    for text in (repro.output, *logged, *map(repr, written)):
        assert PASSWORD not in text


def test_sweep_metrics_run_along_the_effective_batch(clone: Clone) -> None:
    client, (run,) = runs(clone, "throughput")
    history = client.get_metric_history(run.info.run_id, "sgd/samples_per_sec")
    curve = clone.json("outputs/throughput/accum-curve.json")["points"]
    assert [(each.step, each.value) for each in history] == [
        (p["effective_batch"], p["samples_per_sec"]) for p in curve
    ]
    assert [each.timestamp for each in history] == sorted({each.timestamp for each in history})


def test_the_ablation_logs_its_loss_curves(clone: Clone) -> None:
    client, (run,) = runs(clone, "ablation")
    assert [each.step for each in client.get_metric_history(run.info.run_id, "sgd/naive/loss/n4")] == [1, 2, 3]


def test_the_learning_curves_of_all_arms_overlay_against_samples(clone: Clone) -> None:
    client, (run,) = runs(clone, "efficiency")
    for effective_batch in (4, 8, 32):
        history = client.get_metric_history(run.info.run_id, f"sgd/validation_loss_by_samples/b{effective_batch}")
        assert [each.step for each in history] == [0, 32, 64]


def test_a_second_repro_measures_nothing(said: dict[str, str]) -> None:
    assert set(stages_run(said["make repro"])) <= {"environment", "track"}


def test_an_experiment_runs_what_depends_on_its_change(said: dict[str, str]) -> None:
    assert stages_run(said["dvc exp run -S throughput.micro_batch=8"]) == [
        "environment",
        "throughput",
        "plan",
        "report",
        "track",
    ]


def test_an_experiment_can_be_compared(clone: Clone, said: dict[str, str]) -> None:
    assert re.search(r"throughput\.micro_batch\s+4\s+8", said["dvc params diff"])
    assert re.search(r"peak_samples_per_sec\s+[\d.]+\s+[\d.]+", said["dvc metrics diff"])
    (table,) = (output for command, output in said.items() if command.startswith("dvc exp show"))
    assert re.search(r"\| Experiment +\| flattens_at_effective_batch +\| peak_samples_per_sec +\| throughput", table)
    assert max(map(len, table.splitlines())) < 120
    page = (clone.root / "dvc_plots/index.html").read_text()
    for name in ("throughput", "step-time", "frontier", "memory", "plan", "equivalence", "ablation"):
        assert name in page


def test_a_workload_of_the_users_own_is_measured(said: dict[str, str]) -> None:
    printed = said["dvc exp run -S workload.name=my_model:tiny equivalence"]
    assert stages_run(printed) == ["environment", "equivalence"]
    assert "are the full batch's step" in printed


def test_a_bad_value_in_the_last_section_stops_the_first_stage(unchanged: Clone) -> None:
    unchanged.set("throughput", num_steps="many")
    done = unchanged.run("dvc", "repro", check=False)
    assert done.returncode != 0
    assert stages_run(done.stdout) == ["environment"]
    assert "params.yaml: throughput.num_steps = 'many' is not allowed" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_changing_the_engine_changes_every_measurement(unchanged: Clone) -> None:
    unchanged.edit("src/gradaccum/engine/gradients.py", '"""', '"""Changed. ')
    status = unchanged.run("dvc", "status").stdout
    assert set(MEASURING) <= set(re.findall(r"^(\w+):", status, re.MULTILINE))


def test_changing_how_files_are_written_changes_no_measurement(unchanged: Clone) -> None:
    unchanged.edit("src/gradaccum/results/files.py", '"""The only', '"""Changed. The only')
    status = unchanged.run("dvc", "status").stdout
    assert not set(MEASURING) & set(re.findall(r"^(\w+):", status, re.MULTILINE))


def test_a_stage_whose_claim_fails_leaves_its_files_and_a_failed_run(unchanged: Clone) -> None:
    unchanged.edit("src/gradaccum/engine/accumulator.py", "scale / totals[0] if totals[0] else 0.0", "scale")
    done = unchanged.run("dvc", "repro", "equivalence", check=False)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "sgd, cut 2x4: in float64 the gradient of" in said
    assert "Traceback" not in said
    assert unchanged.json("outputs/equivalence/metrics.json")["equivalent"] is False
    client, found = runs(unchanged, "equivalence")
    (failed,) = (run for run in found if run.info.status == "FAILED")
    assert "accum-curve.json" in {entry.path for entry in client.list_artifacts(failed.info.run_id)}


def test_a_workload_of_the_users_own_is_measured_again_when_its_file_changes(unchanged: Clone) -> None:
    own = Path(__file__).parents[1] / "own_workload.py"
    (unchanged.root / "my_model.py").write_text(own.read_text())
    unchanged.set("workload", name="my_model:regression")
    unchanged.run("dvc", "repro", "environment")
    before = unchanged.json("outputs/environment.json")["workload_source"]
    unchanged.edit("my_model.py", "0.1 *", "0.2 *")
    unchanged.run("dvc", "repro", "environment")
    assert unchanged.json("outputs/environment.json")["workload_source"] not in (None, before)
    assert set(MEASURING) <= set(re.findall(r"^(\w+):", unchanged.run("dvc", "status").stdout, re.MULTILINE))
    (unchanged.root / "my_model.py").unlink()

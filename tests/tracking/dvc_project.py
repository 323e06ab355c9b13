"""A small project that DVC really runs: two measuring stages, a report and `track`, on this code's own tracking."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner, Result
from mlflow import MlflowClient
from mlflow.entities import Run

import gradaccum
from gradaccum.commands.main import main
from gradaccum.tracking.client import open_client
from gradaccum.tracking.store import Store, locate

SOURCE = Path(gradaccum.__file__).parents[1]

# `equivalence` gives the same result each time, `throughput` never does: its samples per second are a clock's.
STAGE = """
import sys, time
from gradaccum.config import read_params
from gradaccum.results.curve import Curve
from gradaccum.results.files import write_outcome
from gradaccum.results.outcome import Outcome
from gradaccum.tracking.stage_run import stage_run

VERSION = 1
stage = sys.argv[1]
params = read_params()
own = params[stage]
with stage_run(stage, {"seed": params["seed"], stage: own}) as run:
    if own["fail"]:
        raise SystemExit("the stage fails")
    rate = time.time() if stage == "throughput" else 1.0
    points = [
        {"series": "sgd", "effective_batch": own["micro_batch"] * n, "accum_steps": n, "samples_per_sec": rate + n}
        | {"micro_batch": own["micro_batch"], "world_size": 1}
        for n in (1, 2, 4)
    ]
    metrics = {"peak": rate, "version": VERSION, "undefined": None}
    outcome = Outcome(metrics, Curve(stage, "effective_batch", tuple(points)), [])
    run.log(outcome, artifacts=write_outcome(outcome), figures={f"{stage}.png": b"figure"})
"""

PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAAAAABX3VL4AAAADElEQVR4nGNg+A+EAAYAAf+T0eSJAAAAAElFTkSuQmCC"

REPORT = f"""
from base64 import b64decode
from pathlib import Path
from gradaccum.results.files import read_curve, write_bytes, write_json
curve = read_curve(Path("outputs/throughput/accum-curve.json"))
write_json(Path("outputs/accum-curve.json"), curve.to_json())
write_bytes(Path("outputs/report/throughput.png"), b64decode("{PICTURE}"))
"""

TRACK = """
from gradaccum.tracking.track import track
track()
"""

MEASURING = """
  {stage}:
    cmd: python stages/measure.py {stage}
    deps: [stages/measure.py]
    params: [seed, {stage}]
    outs: [outputs/{stage}/accum-curve.json]
    metrics: [outputs/{stage}/metrics.json: {{cache: false}}]
"""

PIPELINE = f"""
stages:
{MEASURING.format(stage="equivalence")}
{MEASURING.format(stage="throughput")}
  report:
    cmd: python stages/report.py
    deps: [stages/report.py, outputs/throughput/accum-curve.json]
    outs: [outputs/accum-curve.json, outputs/report]
  track:
    cmd: python stages/track.py
    always_changed: true
    deps:
      - outputs/accum-curve.json
      - outputs/equivalence/accum-curve.json
      - outputs/equivalence/metrics.json
      - outputs/report
      - outputs/throughput/accum-curve.json
      - outputs/throughput/metrics.json
"""

PARAMS = """
seed: 7
equivalence: {micro_batch: 4, fail: false}
throughput: {micro_batch: 4, fail: false}
"""

FILES = {
    "stages/measure.py": STAGE,
    "stages/report.py": REPORT,
    "stages/track.py": TRACK,
    "dvc.yaml": PIPELINE,
    "params.yaml": PARAMS,
    ".gitignore": "mlflow.db*\nmlartifacts/\n.track/\n",
    ".dvcignore": "mlflow.db*\nmlartifacts\n.track\n",
    ".dvc/config": "[core]\n    analytics = false\n    autostage = true\n",
}


@dataclass(frozen=True)
class Project:
    """One such project in a folder of its own, tracked beside it or, under an experiment of its own, on a server."""

    root: Path
    uri: str = ""
    experiment: str = ""

    def run(self, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        changes = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCE)}
        env = os.environ | changes | {"GRADACCUM_TRACKING": "strict"} | self._tracking() | environment
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, env=env, timeout=300, check=False)
        assert done.returncode == 0 or not check, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done

    def dvc(self, *arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "dvc", *arguments, check=check, **environment)

    def sync(self, *options: str, check: bool = True) -> Result:
        """`gradaccum sync`, in this process: it need not import mlflow anew."""
        with chdir(self.root):
            done = CliRunner().invoke(main, ["sync", *options], env={"DVC_ROOT": None, **self._tracking()})
        assert done.exit_code == 0 or not check, done.output
        return done

    def git(self, *arguments: str) -> str:
        return self.run("git", *arguments).stdout.strip()

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def edit(self, file: str, old: str, new: str) -> None:
        text = (self.root / file).read_text()
        assert old in text
        (self.root / file).write_text(text.replace(old, new))

    @property
    def store(self) -> Store:
        return locate(self.root, self._tracking())

    @property
    def client(self) -> MlflowClient:
        return open_client(self.store)

    def stage_runs(self) -> list[Run]:
        return self._runs(self.store.stages_name)

    def pipeline_runs(self) -> list[Run]:
        return self._runs(self.store.name)

    def _tracking(self) -> dict[str, str]:
        return {"MLFLOW_TRACKING_URI": self.uri, "MLFLOW_EXPERIMENT_NAME": self.experiment}

    def _runs(self, name: str) -> list[Run]:
        experiment = self.client.get_experiment_by_name(name)
        ids = [experiment.experiment_id] if experiment else []
        return list(self.client.search_runs(ids, order_by=["attributes.start_time ASC"])) if ids else []

    def census(self) -> dict[str, int]:
        """How many runs there are: by stage, those made of cached results apart, and of the pipeline."""
        counts = Counter(_kind(run) for run in self.stage_runs())
        return dict(counts) | {"pipeline": len(self.pipeline_runs())}


def _kind(run: Run) -> str:
    how = " cached" if "dvc.cached" in run.data.tags else ""
    return f"{run.data.tags['stage']}{how}" + ("" if run.info.status == "FINISHED" else f" {run.info.status}")


def make_project(root: Path) -> Project:
    """The project, committed, not yet run."""
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.lstrip("\n"))
    project = Project(root)
    project.git("init", "--quiet", "--initial-branch", "main")
    project.git("config", "user.name", "n")
    project.git("config", "user.email", "n@example.org")
    project.commit("Begin")
    return project


def wait_until(happened: Callable[[], bool], *, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)

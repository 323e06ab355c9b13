"""What a test reads back from MLflow."""

from __future__ import annotations

from mlflow import MlflowClient
from mlflow.entities import Run

from gradaccum.tracking.store import Store


def runs(client: MlflowClient, store: Store) -> list[Run]:
    experiment = client.get_experiment_by_name(store.stages_name)
    return list(client.search_runs([experiment.experiment_id], order_by=["start_time"])) if experiment else []


def only_run(client: MlflowClient, store: Store) -> Run:
    (run,) = runs(client, store)
    return run


def history(client: MlflowClient, run: Run, name: str) -> list[tuple[int, float]]:
    samples = client.get_metric_history(run.info.run_id, name)
    return [(sample.step, sample.value) for sample in sorted(samples, key=lambda sample: sample.timestamp)]

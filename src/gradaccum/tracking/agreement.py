"""Makes MLflow agree with dvc.lock: one run a stage key, one run a pipeline state, whatever DVC executed.

A stage that DVC finds cached, or restores from its run cache, does not run, so it logs nothing. Here its run is found,
or made from its files. Importing this imports mlflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from filelock import FileLock
from mlflow.entities import Run

from gradaccum.tracking.client import experiment_id, open_client
from gradaccum.tracking.journal import Journal, bury_the_dead
from gradaccum.tracking.lockfile import LockedStage, Pipeline
from gradaccum.tracking.memory import forget_runs, recall_runs, remember_publication
from gradaccum.tracking.provenance import Origin
from gradaccum.tracking.publication import Press
from gradaccum.tracking.records import DESCRIPTION, cut_params, described
from gradaccum.tracking.store import MEMORY, Store

LIVE, PUBLISHED, UNCHANGED = "logged live", "published from the files", "unchanged"


@dataclass(frozen=True)
class Agreement:
    """What was done: for each run, by the name of its stage or `pipeline`, how it came about; and what hindered it.

    A run was LIVE, logged by its stage; or is PUBLISHED now, from the files; or UNCHANGED, as it was there.
    """

    runs: Mapping[str, str]
    problems: list[str]

    def __str__(self) -> str:
        by_how: dict[str, list[str]] = {}
        for name, how in self.runs.items():
            by_how.setdefault(how, []).append(name)
        return "; ".join(f"{how}: {', '.join(names)}" for how, names in by_how.items()) or "nothing to publish"


def agree(store: Store, pipeline: Pipeline, origin: Origin) -> Agreement:
    """Find, claim or publish the run of every stage, then that of the pipeline's state; one process at a time."""
    memory = store.root / MEMORY
    memory.mkdir(exist_ok=True)
    with FileLock(memory / "agree.lock"):
        return Agreeing(store, pipeline, origin).agree()


def has_run(store: Store, pipeline: Pipeline, origin: Origin) -> bool:
    """Whether the pipeline's state has its run already, under the origin's name."""
    return Agreeing(store, pipeline, origin).has_run()


class Agreeing:
    """One pass over the pipeline's stages, then its state."""

    def __init__(self, store: Store, pipeline: Pipeline, origin: Origin) -> None:
        self.client = open_client(store)
        self.store = store
        self.pipeline = pipeline
        self.origin = origin
        self.press = Press(self.client, store, origin)
        self.stages_id = experiment_id(self.client, store, store.stages_name)
        self.pipelines_id = experiment_id(self.client, store, store.name)
        self.runs: dict[str, str] = {}

    def has_run(self) -> bool:
        found = self.state_runs()
        return bool(found) and self.origin.experiment in ("", *_names(found[0]))

    def agree(self) -> Agreement:
        bury_the_dead(self.client, self.store, [self.stages_id, self.pipelines_id])
        measured = [stage for stage in self.pipeline.counted if stage.measures]
        links = {f"stage_run.{stage.name}": self.stage_run(stage) for stage in measured if not stage.unlike_the_files()}
        problems = self.pipeline.problems()
        if measured and not problems:
            self.pipeline_run(links)
        forget_runs()
        return Agreement(self.runs, problems)

    def stage_run(self, stage: LockedStage) -> str:
        """The id of the stage's one run."""
        same = self.finished(self.stages_id, f"tags.stage = '{stage.name}' AND tags.results = '{stage.results}'")
        keyed = [run for run in same if run.data.tags.get("stage_key") == stage.key]
        alike = self.unclaimed(stage, same)
        if keyed:
            self.revive(keyed[0], self.stages_id)
            self.runs[stage.name] = UNCHANGED
            run_id = str(keyed[0].info.run_id)
        else:
            run_id = self.claim(stage, alike) or self.publish(stage)
            self.identify(run_id, self.stages_id, inputs=stage.inputs, mark={"stage_key": stage.key})
        self.drop_the_repetitions(stage, [run for run in alike if run.info.run_id != run_id])
        return run_id

    def unclaimed(self, stage: LockedStage, same: list[Run]) -> list[Run]:
        """Live runs of these results and params that no pipeline came to claim, the latest first."""
        params, _ = cut_params(stage.flat_params())
        live = [run for run in same if "stage_key" not in run.data.tags]
        return [run for run in live if all(params.get(k, v) == v for k, v in run.data.params.items())]

    def drop_the_repetitions(self, stage: LockedStage, repeated: list[Run]) -> None:
        """A run forced here, with the results that the stage's run already has, says nothing new."""
        for run_id in self.made_here(stage) & {run.info.run_id for run in repeated}:
            self.client.delete_run(run_id)

    def made_here(self, stage: LockedStage) -> set[str]:
        return recall_runs(stage.name, store=self.store, results=stage.results)

    def claim(self, stage: LockedStage, alike: list[Run]) -> str | None:
        """The live run just made here; else one like it, made elsewhere."""
        mine = self.made_here(stage)
        for run in sorted(alike, key=lambda run: run.info.run_id not in mine):
            missing = {name: text for name, text in stage.flat_params().items() if name not in run.data.params}
            Journal(self.client, run.info.run_id).params(missing)
            self.runs[stage.name] = LIVE
            return str(run.info.run_id)
        return None

    def publish(self, stage: LockedStage) -> str:
        self.runs[stage.name] = PUBLISHED
        return self.press.stage(self.stages_id, stage)

    def pipeline_run(self, links: Mapping[str, str]) -> None:
        """The pipeline state's one run, under the names of all experiments that led to it."""
        found = self.state_runs()
        name = self.origin.experiment
        known = _names(found[0]) if found else []
        names = known + ([name] if name and name not in known else [])
        tags = {**links, **({"dvc.exp_names": ", ".join(names)} if names else {})}
        if found:
            self.refresh(found[0], tags)
        else:
            self.publish_state({**tags, **self.summary(links)})
        remember_publication(self.store, self.pipeline.state, names)

    def summary(self, links: Mapping[str, str]) -> dict[str, str]:
        """The state's description: of each stage its question and the first that it found."""
        notes = {name: self.client.get_run(run_id).data.tags.get(DESCRIPTION, "") for name, run_id in links.items()}
        first = [(name.partition(".")[2], note.replace("\n\n- ", " ").splitlines()) for name, note in notes.items()]
        return described("", [f"{stage}: {lines[0]}" for stage, lines in first if lines])

    def refresh(self, run: Run, tags: Mapping[str, str]) -> None:
        changed = {name: text for name, text in tags.items() if run.data.tags.get(name) != text}
        Journal(self.client, run.info.run_id).tags(changed)
        self.revive(run, self.pipelines_id)
        self.runs["pipeline"] = UNCHANGED

    def publish_state(self, tags: Mapping[str, str]) -> None:
        run_id = self.press.pipeline(self.pipelines_id, self.pipeline, tags)
        mark = {"state": self.pipeline.state}
        self.identify(run_id, self.pipelines_id, inputs=self.pipeline.inputs, mark=mark)
        self.runs["pipeline"] = PUBLISHED

    def identify(self, run_id: str, experiment: str, *, inputs: str, mark: Mapping[str, str]) -> None:
        """Tag a whole run as what it is - last of all, so that a half-made one is never taken for it."""
        journal = Journal(self.client, run_id)
        journal.tags({"inputs": inputs})
        later = self.later(run_id, experiment, inputs)
        if later:
            journal.tags({"superseded": later})
        else:
            self.supersede_the_others(run_id, experiment, inputs)
        journal.tags(mark)

    def later(self, run_id: str, experiment: str, inputs: str) -> str | None:
        """The run that had superseded one of the past when that was published."""
        since = self.origin.committed_ms
        others = self.finished(experiment, f"tags.inputs = '{inputs}'") if since is not None else []
        current = [run for run in others if run.info.run_id != run_id and "superseded" not in run.data.tags]
        return next((run.info.run_id for run in current if run.info.start_time > since), None)

    def revive(self, run: Run, experiment: str) -> None:
        """The working folder went back to a run that a later one had superseded: now it is the current one."""
        if "superseded" in run.data.tags and not self.origin.past:
            self.client.delete_tag(run.info.run_id, "superseded")
            self.supersede_the_others(run.info.run_id, experiment, run.data.tags["inputs"])

    def supersede_the_others(self, run_id: str, experiment: str, inputs: str) -> None:
        for run in self.finished(experiment, f"tags.inputs = '{inputs}'"):
            if run.info.run_id != run_id and run.data.tags.get("superseded") != run_id:
                self.client.set_tag(run.info.run_id, "superseded", run_id)

    def state_runs(self) -> list[Run]:
        return self.finished(self.pipelines_id, f"tags.state = '{self.pipeline.state}'")

    def finished(self, experiment: str, condition: str) -> list[Run]:
        query = f"attributes.status = 'FINISHED' AND {condition}"
        return list(self.client.search_runs([experiment], query, order_by=["attributes.start_time DESC"]))


def _names(run: Run) -> list[str]:
    """The experiments that led to the run's state."""
    return [name for name in run.data.tags.get("dvc.exp_names", "").split(", ") if name]

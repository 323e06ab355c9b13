"""MLflow's UI in a real browser: two experiments that differ in one parameter can be told apart."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.tracking.dvc_project import SOURCE, Project

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="needs Debian's chromium"),
]
METRIC = "throughput/sgd/samples_per_sec"
PARAM = "throughput.micro_batch"
EXPERIMENTS = {"larger": 8, "largest": 16}  # the baseline has 4
PATIENCE_MS = 60_000


@dataclass(frozen=True)
class UI:
    """`make ui` over a project with a baseline and two experiments; `runs` are those of the experiments."""

    address: str
    said: str
    noise: Path
    project: Project
    runs: list[str]
    experiment: str

    def page(self, kind: str, **query: object) -> str:
        """Chart and compare addresses take JSON in the query."""
        pairs = [f"{name}={value if name == 'x_axis' else json.dumps(value)}" for name, value in query.items()]
        return f"{self.address}/#/{kind}?{'&'.join(pairs)}"


@pytest.fixture(scope="module")
def ui(template: Project, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UI]:
    root = tmp_path_factory.mktemp("ui") / "project"
    shutil.copytree(template.root, root, symlinks=True)
    project = Project(root)
    for name, value in EXPERIMENTS.items():
        project.dvc("exp", "run", "--name", name, "-S", f"{PARAM}={value}")
    baseline, *runs = project.pipeline_runs()
    port = free_port()
    command = [sys.executable, "-m", "gradaccum.tracking.ui", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    noise = root.parent / "stderr"
    with (
        noise.open("w") as stderr,
        subprocess.Popen(
            command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as served,
    ):
        assert served.stdout is not None
        said = "".join(served.stdout.readline() for _ in range(3))
        try:
            wait_for(f"http://127.0.0.1:{port}/health")
            ids = [run.info.run_id for run in runs]
            yield UI(f"http://127.0.0.1:{port}", said, noise, project, ids, baseline.info.experiment_id)
        finally:
            served.send_signal(signal.SIGTERM)
            served.wait(timeout=30)
    with pytest.raises(URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 2600, "height": 1100})
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        yield page
        browser.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(address: str) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(address, timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{address} did not answer")


def test_it_says_where_it_is_and_what_it_reads(ui: UI) -> None:
    assert f"Pipeline runs: {ui.address}/#/experiments/{ui.experiment}/runs" in ui.said
    assert f"Store: sqlite:///{ui.project.root}/mlflow.db" in ui.said
    assert "DeprecationWarning" not in ui.noise.read_text()


def test_the_runs_table_lists_all_with_the_parameter_they_differ_in(ui: UI, page: Page) -> None:
    page.goto(re.findall(r"http\S+", ui.said)[0])
    for name in EXPERIMENTS:  # whose parameters the list of columns is made of
        expect(page.get_by_text(name, exact=True)).to_be_visible()
    page.get_by_role("button", name="Columns", exact=True).click()
    page.get_by_placeholder("Search columns").fill(PARAM)
    page.get_by_text(PARAM).click()
    page.keyboard.press("Escape")

    expect(page.get_by_role("columnheader", name=PARAM).first).to_be_visible()
    cells = page.locator(f'[role=gridcell][col-id*="{PARAM}"]')
    expect(cells).to_have_text(["16", "8", "4"])


def test_the_compare_page_shows_the_parameter_that_differs(ui: UI, page: Page) -> None:
    page.goto(ui.page("compare-runs", runs=ui.runs, experiments=[ui.experiment]))

    expect(page.get_by_text("Comparing 2 Runs from 1 Experiment")).to_be_visible()
    row = page.get_by_role("row").filter(has_text=PARAM)
    expect(row.get_by_role("cell")).to_have_text(["8", "16"])


def test_the_metric_chart_draws_a_line_a_run_over_the_effective_batch(ui: UI, page: Page) -> None:
    page.goto(
        ui.page(
            "metric",
            runs=ui.runs,
            experiments=[ui.experiment],
            metric=METRIC,
            plot_metric_keys=[METRIC],
            x_axis="step",
        )
    )

    page.wait_for_function("document.querySelector('.js-plotly-plot')?.data?.length >= 2")
    traces = page.evaluate("document.querySelector('.js-plotly-plot').data.map(t => [t.name, Array.from(t.x)])")
    lines = dict(traces)
    assert sorted(lines.values()) == [[8, 16, 32], [16, 32, 64]]
    assert len(lines) == 2


def test_the_artifact_page_shows_the_figure_of_the_curve(ui: UI, page: Page) -> None:
    page.goto(f"{ui.address}/#/experiments/{ui.experiment}/runs/{ui.runs[1]}/artifacts/figures/throughput.png")

    picture = page.locator("img[src^='blob:']").first
    expect(picture).to_be_attached()
    page.wait_for_function("[...document.images].some(i => i.src.startsWith('blob:') && i.naturalWidth > 1)")

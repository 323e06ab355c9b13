from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from gradaccum.commands.main import main
from tests.e2e.clone import clone_working_tree

FRONTIER = """workload,optimizer,micro_batch,t_micro_ms,median_step_ms
digits_cnn,sgd,1,1,24
digits_cnn,sgd,24,4,4
"""


@pytest.mark.e2e
def test_the_line_that_a_plan_prints_runs_and_measures_the_plan_s_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = clone_working_tree(tmp_path)
    clone.set("throughput", num_steps=1, repeats=1)
    (clone.root / "outputs/throughput/frontier.csv").write_text(FRONTIER)
    monkeypatch.chdir(clone.root)
    options = ("--effective-batch", "24", "--memory", "8GiB", "--workload", "digits_cnn")
    said = CliRunner().invoke(main, ["plan", *options])
    clone.run("bash", "-c", said.output.partition("Measure it: ")[2], GRADACCUM_TRACKING="off")
    points = clone.json("outputs/throughput/accum-curve.json")["points"]
    assert [(point["micro_batch"], point["accum_steps"]) for point in points] == [(24, n) for n in (1, 2, 4, 8, 16)]

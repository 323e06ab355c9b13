from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradaccum.commands.main import main
from gradaccum.workloads.choice import BUILT_IN

MODULE = """
from dataclasses import replace
import torch.nn.functional as F
from torch import nn
from tests.own_workload import regression

def naive(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        F.mse_loss(model(inputs), targets).backward()
    optimizer.step()

def broken(model, optimizer, micro_batches):
    raise RuntimeError("no such device")

def leaving(model, optimizer, micro_batches):
    raise SystemExit(0)

def stopped(model, optimizer, micro_batches):
    raise KeyboardInterrupt

def empty():
    return replace(regression(), train=[])

def deep():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.a_backbone_with_a_name_that_is_far_too_long_for_a_table = regression().make_model()
        def forward(self, inputs):
            return self.a_backbone_with_a_name_that_is_far_too_long_for_a_table(inputs)
    return replace(regression(), make_model=Nested)

def sized(features, samples=40):
    return regression()
"""


@pytest.fixture
def own_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_loop.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_loop", raising=False)
    return "own_loop"


def gradaccum(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["diagnose", *arguments])


def test_it_ends_with_0_where_the_loop_is_equivalent(own_loop: str) -> None:
    result = gradaccum(f"{own_loop}:regression", "--samples", "12", "--cut", "5,4,3")
    assert (result.exit_code, "5+4+3" in result.output) == (0, True)
    assert "Equivalent to the full batch." in result.output


def test_more_samples_than_there_are_is_told(own_loop: str) -> None:
    assert "which are taken" in gradaccum(f"{own_loop}:regression", "--samples", "99999").output
    assert "which are taken" not in gradaccum(f"{own_loop}:regression", "--samples", "12").output


def test_it_ends_with_1_and_the_mistake_where_the_loop_is_wrong(own_loop: str) -> None:
    result = gradaccum(f"{own_loop}:regression", "--step", f"{own_loop}:naive")
    assert result.exit_code == 1
    assert "the loss is not divided by the 2 accumulation steps" in " ".join(result.output.split())


def test_advice_is_given_once_and_a_long_name_keeps_its_layer(own_loop: str) -> None:
    output = gradaccum(f"{own_loop}:deep", "--step", f"{own_loop}:naive").output
    assert output.count("divide each micro-batch's loss") == 1
    assert output.count("loop: cut") > 1
    assert re.search(r"\.\.\.\S+(weight|bias) \(x", output)


def test_it_ends_with_1_where_the_loss_is_no_sum_over_samples() -> None:
    result = gradaccum("contrastive")
    assert (result.exit_code, "not separable" in result.output) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("own_loop:regression", "--step", "own_loop:broken"), "own_loop.py, line 14: RuntimeError: no such device"),
        (("own_loop:regression", "--step", "own_loop:leaving"), "Not judged: own_loop.py, line 17: SystemExit: 0"),
        (("own_loop:regression", "--step", "own_loop:stopped"), "Not judged: own_loop.py, line 20: KeyboardInterrupt"),
        (("own_loop:empty",), "has 0 training samples"),
        (("own_loop:sized",), "missing .*features"),
        (("synthetic",), "workload.synthetic is missing"),
        (("own_loop:regression", "--step", "own_loop:nothing"), "has no attribute 'nothing'"),
        (("own_loop:regression", "--cut", "5,4"), "adds up to 9, but the batch has 16 samples"),
        (("nowhere:factory",), "no module 'nowhere'"),
        (("own_loop:naive",), "Not judged"),
    ],
)
@pytest.mark.usefixtures("own_loop")
def test_it_ends_with_2_where_nothing_could_be_judged(arguments: tuple[str, ...], message: str) -> None:
    result = gradaccum(*arguments)
    assert result.exit_code == 2, result.output
    assert re.search(message, result.output)


@pytest.mark.usefixtures("own_loop")
def test_a_workloads_options_are_those_of_params_yaml() -> None:
    Path("params.yaml").write_text(
        "workload:\n  name: digits\n  other: {a: 1}\n  sized: {features: 3}\n"
        "  synthetic: {in_features: 4, hidden: 5, out_features: 3, samples: 40}\n"
    )
    assert gradaccum("own_loop:sized").exit_code == 0
    assert gradaccum("synthetic").exit_code == 0


def test_help_names_every_built_in_workload() -> None:
    (named,) = re.findall(r"built-in one \(([^)]*)\)", " ".join(gradaccum("--help").output.split()))
    assert named.split(", ") == list(BUILT_IN)


@pytest.mark.parametrize("cut", ["5,zero", "²", "0", "٣", 5000 * "9"])
def test_a_cut_that_is_none_is_refused(cut: str) -> None:
    result = gradaccum("digits", "--cut", cut)
    assert (result.exit_code, "Write the sizes of the micro-batches" in result.output) == (2, True)


def test_help_imports_neither_torch_nor_mlflow() -> None:
    code = (
        "import sys\nfrom gradaccum.commands.main import main\n"
        "try: main(['diagnose', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'mlflow', 'numpy'} & set(sys.modules), 'too much'"
    )
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"], check=True, timeout=60)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc.utils.serialize import load_yaml

from gradaccum.config import read_params, refuse_unknown, section, shared, together
from gradaccum.errors import ConfigError
from gradaccum.measurements import ablation, efficiency, equivalence, memory, plan, scaling, throughput
from gradaccum.measurements.setup import Setup

ROOT = Path(__file__).parents[1]
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text())
SIZES = PARAMS["workload"]["synthetic"]
CONFIGS = {
    "equivalence": equivalence.Config,
    "ablation": ablation.Config,
    "throughput": throughput.Config,
    "memory": memory.Config,
    "plan": plan.Config,
    "efficiency": efficiency.Config,
    "scaling": scaling.Config,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_committed_params_are_valid(name: str) -> None:
    assert isinstance(section(read_params(ROOT / "params.yaml"), name, CONFIGS[name]), CONFIGS[name])


@pytest.mark.parametrize("written", ["1e-05", "1E-5", "1.0e-05", "0.00001", "1e-5"])
def test_a_number_as_dvc_writes_it_is_a_number(tmp_path: Path, written: str) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(f"tolerance: {written}\n")
    assert read_params(file) == {"tolerance": 1e-5}


YAML_1_1_READS_OTHERWISE = ["010", "08", "0o10", "-0o7", "1:00", "1:30.5", "yes", "Yes", "on", "off", "No", "._5"]


@pytest.mark.parametrize(
    "written", [*YAML_1_1_READS_OTHERWISE, *["0x1F", "1_000", "1e4", ".5", "~", "true", "y", ".inf", "12e03"]]
)
def test_a_scalar_is_read_as_dvc_reads_and_records_it(tmp_path: Path, written: str) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(f"seed: {written}\n")
    ours, recorded = read_params(file)["seed"], load_yaml(str(file))["seed"]
    assert (ours, type(ours)) == (recorded, type(recorded))


@pytest.mark.parametrize(
    ("name", "key", "value", "told"),
    [
        ("equivalence", "tolerance", "small", r"equivalence\.tolerance = 'small' is not allowed: it should be a valid"),
        ("equivalence", "tolerance", 0.0, r"equivalence\.tolerance = 0\.0 .*greater than 0"),
        ("equivalence", "accum_steps", [1, 3], "3, which does not divide effective_batch=16"),
        ("equivalence", "accum_steps", [2, True], r"equivalence\.accum_steps\.1 = True .*valid integer"),
        ("equivalence", "accum_steps", [1], "nothing is accumulated"),
        ("equivalence", "cuts", [[5, 4]], r"\[5, 4\], which adds up to 9, not to effective_batch=16"),
        ("equivalence", "optimizers", ["lion"], r"optimizers\.0 = 'lion' .*'sgd' or 'adamw'"),
        ("equivalence", "optimizers", ["sgd", "sgd"], "sgd more than once"),
        ("memory", "budget_bytes", 10**400, r"memory\.budget_bytes = 10+ .*less than"),
        ("plan", "memory_bytes", 10**400, r"plan\.memory_bytes = 10+ .*less than"),
        ("ablation", "num_steps", 0, r"ablation\.num_steps = 0 .*greater than or equal to 1"),
        ("ablation", "variants", ["naive"], "lacks 'scaled'"),
        ("ablation", "accum_steps", [64], "micro-batches of one sample all count the same"),
        ("throughput", "micro_batch", 2.5, r"throughput\.micro_batch = 2\.5 .*valid integer"),
        ("throughput", "accum_steps", [4], r"throughput\.accum_steps = .*at least 2"),
        ("throughput", "optimizer", None, r"throughput\.optimizer = None"),
        ("throughput", "stepps", 3, r"throughput\.stepps = 3 is unknown"),
        ("efficiency", "seeds", [1, 2], r"efficiency\.seeds = .*at least 3"),
        ("efficiency", "seeds", [1, 2, 2], "2 more than once"),
        ("efficiency", "accum_steps", [1], "at least 2"),
        ("efficiency", "samples", 1000, r"1000 is not a multiple of the effective batch 16, .* such as 1024"),
        ("efficiency", "scaling", "cubic", r"efficiency\.scaling = 'cubic' .*'none', 'linear' or 'sqrt'"),
        ("efficiency", "scaling", "none", "nothing to warm up to. Set warmup_fraction to 0"),
        ("efficiency", "beta2_rule", "half_life", "optimizer='sgd', which has no second moment"),
        ("efficiency", "warmup_fraction", 1.0, r"efficiency\.warmup_fraction = 1\.0 .*less than 1"),
        ("scaling", "linear", {}, r"scaling\.linear\.micro_batch is missing"),
        (
            "scaling",
            "half_life",
            {"micro_batch": 4, "accum_steps": [1, 3], "samples": 16, "base_lr": 0.1, "base_beta2": 0.9},
            "16 is not a multiple of the effective batch 12",
        ),
    ],
)
def test_a_bad_value_names_file_section_key_value_and_what_is_allowed(
    name: str, key: str, value: Any, told: str
) -> None:
    params = {**PARAMS, name: {**PARAMS[name], key: value}}
    with pytest.raises(ConfigError, match=told) as error:
        section(params, name, CONFIGS[name])
    assert str(error.value).startswith("params.yaml: ")


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in CONFIGS for key in PARAMS[name]])
def test_no_key_has_a_hidden_default(name: str, key: str) -> None:
    params = {name: {other: value for other, value in PARAMS[name].items() if other != key}}
    with pytest.raises(ConfigError, match=rf"{name}\.{key} is missing"):
        section(params, name, CONFIGS[name])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": -1}, "seed = -1"),
        ({"device": "tpu"}, "device = 'tpu' .*'auto', 'cpu' or 'cuda'"),
        ({"threads": 0}, "threads = 0"),
        ({"optimizers": {"sgd": {"lr": "fast"}, "adamw": {"lr": 0.1}}}, r"optimizers\.sgd\.lr = 'fast'"),
        (
            {"optimizers": {"sgd": {"lr": 0.1}, "adamw": {"lr": 0.1, "clip": 1}}},
            r"optimizers\.adamw\.clip = 1 is unknown",
        ),
        ({"workload": {}}, "names none"),
        ({"workload": {"name": "imagenet"}}, "'imagenet' is unknown.*digits, digits_cnn, dictionary"),
        ({"workload": {"name": "synthetic"}}, "workload.synthetic is missing"),
        ({"workload": {"name": "synthetic", "synthetic": {"hidden": 0}}}, r"workload\.synthetic\.hidden = 0"),
        ({"workload": {"name": "synthetic", "synthetic": {"hidden": 2**63}}}, r"hidden = 9223.* less than 2147483648"),
        ({"workload": {"name": "synthetic", "synthetic": {**SIZES, "hidden": 10**9}}}, "8 GiB.*Lower hidden"),
        ({"workload": {"name": "synthetic", "synthetic": {**SIZES, "samples": 10**9}}}, "8 GiB.*Lower samples"),
        ({"workload": {"name": "digits", "cnn": {}}}, "workload.cnn is unknown"),
        ({"workload": {"name": "nowhere.to:find"}}, "no module 'nowhere.to'"),
    ],
)
def test_a_bad_shared_key_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        shared({**PARAMS, **changes}, Setup)


def test_all_problems_of_a_section_are_told_at_once() -> None:
    params = {"throughput": {**PARAMS["throughput"], "num_steps": 0, "repeats": "many"}}
    with pytest.raises(ConfigError) as error:
        section(params, "throughput", throughput.Config)
    assert len(str(error.value).splitlines()) == 2


def test_a_missing_section_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no section 'throughput'"):
        section({}, "throughput", throughput.Config)
    with pytest.raises(ConfigError, match="Run from the project's root"):
        read_params(tmp_path / "params.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_params(tmp_path)


def test_a_wrong_element_is_told_once_and_a_list_is_called_one() -> None:
    with pytest.raises(ConfigError) as error:
        section({"throughput": {**PARAMS["throughput"], "accum_steps": ["two"]}}, "throughput", throughput.Config)
    assert len(str(error.value).splitlines()) == 1
    assert "throughput.accum_steps.0 = 'two'" in str(error.value)
    with pytest.raises(ConfigError, match="List should have at least 2 items"):
        section({"throughput": {**PARAMS["throughput"], "accum_steps": [1]}}, "throughput", throughput.Config)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "seed: 1\ndevice: cpu\nseed: 2\n",
            'params.yaml, line 3, column 1: found duplicate key "seed" with value "2" (original value: "1")',
        ),
        (
            "plan:\n  a: 1\n  a: 2\n",
            'params.yaml, line 3, column 3: found duplicate key "a" with value "2" (original value: "1")',
        ),
        (
            "plan: {a: 1, a: 2}\n",
            'params.yaml, line 1, column 14: found duplicate key "a" with value "2" (original value: "1")',
        ),
        ("seed: 3\n  device: 4\n", "params.yaml, line 2, column 9: mapping values are not allowed here"),
    ],
)
def test_yaml_that_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_params(tmp_path / "params.yaml")
    assert str(error.value) == f"{tmp_path}/{told}. Correct it there."


def test_a_key_may_stand_in_two_sections(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("plan: {a: 1}\nmemory: {a: 2}\n")
    assert read_params(tmp_path / "params.yaml") == {"plan": {"a": 1}, "memory": {"a": 2}}


def test_what_several_checks_find_is_told_together() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'througput' is read by no stage.*no section 'plan'"):
        together(
            lambda: refuse_unknown({"througput": {}}, {"throughput"}),
            lambda: None,
            lambda: section({}, "plan", plan.Config),
        )


@pytest.mark.parametrize("text", ["", "- 1\n", "seed: [\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(ConfigError):
        read_params(tmp_path / "params.yaml")


def test_a_top_level_key_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="'througput' is read by no stage"):
        refuse_unknown({"throughput": {}, "througput": {}}, {"throughput"})


@pytest.mark.parametrize("text", ["seed: 2020-13-45\n", "seed: !!int abc\n", "seed: " + 5000 * "9" + "\n", 3000 * "["])
def test_yaml_that_python_cannot_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is no YAML"):
        read_params(tmp_path / "params.yaml")


def test_a_huge_effective_batch_is_answered_at_once() -> None:
    params = {"ablation": {**PARAMS["ablation"], "effective_batch": 1_000_000_000_001}}
    with pytest.raises(ConfigError, match="does not divide effective_batch=1000000000001"):
        section(params, "ablation", ablation.Config)

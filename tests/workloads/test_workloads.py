from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradaccum import ConfigError, Workload
from gradaccum.workloads import definitions, dictionary, text
from gradaccum.workloads.choice import BUILT_IN, WorkloadChoice

SIZES = {"in_features": 6, "hidden": 8, "out_features": 3, "samples": 40}
SECTIONS = {name: {"name": name} for name in BUILT_IN} | {"synthetic": {"name": "synthetic", "synthetic": SIZES}}


def load(name: str) -> Workload:
    return WorkloadChoice.parse(SECTIONS.get(name, {"name": name})).load()


@pytest.mark.parametrize("name", [*BUILT_IN, "tests.own_workload:regression"])
def test_a_workload_is_the_same_each_time(name: str) -> None:
    one, other = load(name), load(name)
    for which in ("train", "validation"):
        samples, again = getattr(one, which), getattr(other, which)
        assert len(samples) == len(again) > 0
        torch.testing.assert_close(one.collate([samples[0], samples[1]]), other.collate([again[0], again[1]]))
    torch.manual_seed(1)
    model = one.make_model()
    torch.manual_seed(1)
    for left, right in zip(model.parameters(), other.make_model().parameters(), strict=True):
        assert torch.equal(left, right)


SEPARABLE = [name for name in BUILT_IN if name != "contrastive"]  # whose loss compares samples with each other


@pytest.mark.parametrize("name", SEPARABLE)
def test_right_predictions_are_counted_among_targets_only(name: str) -> None:
    workload = load(name)
    assert workload.correct is not None
    model = workload.make_model()
    inputs, labels = workload.collate([workload.train[index] for index in range(3)])
    targets = labels != -100
    predictions = model(inputs).argmax(dim=-1)
    expected = sum(bool(p == t) for p, t in zip(predictions[targets], labels[targets], strict=True))
    assert int(workload.correct(model, (inputs, labels))) == expected
    right = torch.where(targets, predictions, labels)
    assert int(workload.correct(model, (inputs, right))) == int(targets.sum())


@pytest.mark.parametrize("name", [*SEPARABLE, "tests.own_workload:regression"])
def test_the_loss_is_a_sum_over_samples(name: str) -> None:
    workload = load(name)
    model = workload.make_model().double()
    samples = [workload.train[index] for index in range(4)]

    def collate(picked: list[object]) -> object:
        batch = workload.collate(picked)
        return [t.double() if t.is_floating_point() else t for t in batch]

    whole = workload.objective.loss_sum(model, collate(samples))
    parts = [workload.objective.loss_sum(model, collate([sample])) for sample in samples]
    torch.testing.assert_close(whole, torch.stack(parts).sum())
    assert float(workload.objective.count(collate(samples))) == sum(
        float(workload.objective.count(collate([sample]))) for sample in samples
    )


def test_digits_are_split_without_overlap() -> None:
    digits = load("digits")
    assert (len(digits.train), len(digits.validation)) == (1500, 297)
    inputs, labels = digits.collate([digits.train[index] for index in range(1500)])
    assert inputs.shape == (1500, 64)
    assert (float(inputs.min()), float(inputs.max())) == (0, 1)
    assert sorted(set(labels.tolist())) == list(range(10))


def test_packed_text_predicts_the_next_byte_everywhere() -> None:
    inputs, labels = dictionary.packed(text.entries()[0])[:]
    assert inputs.shape == labels.shape == (len(inputs), 64)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert torch.equal(inputs[1:, 0], labels[:-1, -1])


def test_only_definition_bytes_are_targets() -> None:
    inputs, labels = definitions.pair(text.Entry("CAT, n.", "A soft automaton."))
    assert bytes(inputs.tolist()).decode() == "CAT, n.\nA soft automaton."
    assert bytes(labels[labels >= 0].tolist()).decode() == "A soft automaton.\0"
    assert labels[:7].tolist() == [-100] * 7


def test_definitions_are_padded_to_the_longest_of_their_micro_batch() -> None:
    short, long = (definitions.pair(text.Entry("A", word)) for word in ("b", "bcdef"))
    inputs, labels = definitions.pad([short, long])
    assert inputs.shape == labels.shape == (2, 7)
    assert labels[0].tolist()[3:] == [-100] * 4
    assert int((labels >= 0).sum()) == 2 + 6


def test_definitions_differ_widely_in_length() -> None:
    workload = load("definitions")
    counts = torch.tensor([float((sample[1] >= 0).sum()) for sample in workload.train])
    assert float(counts.std() / counts.mean()) > 0.5
    assert max(len(sample[0]) for sample in workload.train) <= definitions.CONTEXT


def test_padding_behind_a_text_changes_nothing() -> None:
    workload = load("definitions")
    model = workload.make_model().double()
    short, long = workload.train[0], max(workload.train, key=lambda sample: len(sample[0]))
    alone = workload.objective.loss_sum(model, workload.collate([short]))
    padded = workload.collate([short, long])
    padded = (padded[0], padded[1].clone())
    padded[1][1] = -100
    torch.testing.assert_close(workload.objective.loss_sum(model, padded), alone)


def test_every_byte_is_shown_only_what_precedes_it() -> None:
    model = load("dictionary").make_model().eval()
    inputs = torch.randint(256, (1, 64))
    changed = inputs.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 256
    before, after = model(inputs), model(changed)
    assert torch.equal(before[0, :40], after[0, :40])
    assert not torch.allclose(before[0, 40:], after[0, 40:])


def test_options_reach_a_factory_of_the_users_own() -> None:
    choice = WorkloadChoice.parse({"name": "tests.own_workload:regression", "regression": {"hidden": 3}})
    assert choice.load().make_model()[0].out_features == 3  # type: ignore[index, union-attr]


def test_the_source_of_a_factory_is_found_without_importing_it() -> None:
    source = WorkloadChoice.parse({"name": "tests.own_workload:regression"}).source()
    assert source is not None
    assert source.samefile(Path(__file__).parents[1] / "own_workload.py")
    assert WorkloadChoice.parse({"name": "digits"}).source() is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tests.own_workload:nothing", "has no 'nothing'"),
        ("tests.own_workload:no_workload", "returned a str"),
    ],
)
def test_a_factory_that_makes_no_workload_is_refused(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(name)


def test_text_is_sought_in_the_projects_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="Run from the project's root"):
        load("dictionary")

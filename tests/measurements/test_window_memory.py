"""Predicted on fake tensors, tallied on real ones: the same numbers, whatever the model, the cut and the precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradaccum import ConfigError, Objective
from gradaccum.engine.precision import Precision
from gradaccum.measurements import window_memory
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.process_memory import ProcessPeak, give_freed_memory_back
from gradaccum.measurements.processes import own_processes
from gradaccum.measurements.setup import Setup
from gradaccum.measurements.window_memory import Window, observe, on_device, predict, repeated, sample_batch, shape_only

MODELS = ["digits", "digits_cnn", "dictionary", "definitions", "contrastive", "tests.own_workload:regression"]


@pytest.mark.parametrize(("name", "optimizer"), [("digits", "sgd"), *((name, "adamw") for name in MODELS)])
def test_the_prediction_is_the_tally_of_the_real_window(
    name: str, optimizer: str, make_setup: Callable[..., Setup]
) -> None:
    setup = make_setup(name)
    bench = Bench.prepare(setup)
    for micro, steps in ((1, 1), (5, 1), (5, 3)):
        window = Window(micro, steps, getattr(setup.optimizers, optimizer))
        predicted, seen = predict(bench, window), observe(setup, window)
        assert predicted == seen.tally
        assert seen.device_bytes is None


@pytest.mark.parametrize(("name", "precision"), [("digits_cnn", "bf16"), ("dictionary", "fp16")])
def test_a_lower_precision_is_predicted_as_it_runs(
    name: str, precision: Precision, make_setup: Callable[..., Setup]
) -> None:
    setup = make_setup(name)
    window = Window(16, 2, setup.optimizers.adamw, precision)
    assert predict(Bench.prepare(setup), window) == observe(setup, window).tally


@pytest.mark.parametrize(
    ("name", "micro", "scratch"), [("digits", 32768, 0), ("digits_cnn", 4096, 16 * 2**20), ("dictionary", 128, 0)]
)
def test_the_system_sees_what_was_predicted_within_a_tenth_at_a_hundred_mib(
    name: str, micro: int, scratch: int, make_setup: Callable[..., Setup]
) -> None:
    setup = make_setup(name)
    window = Window(micro, 1, setup.optimizers.adamw)
    predicted = predict(Bench.prepare(setup), window).total
    assert predicted > 85 * 2**20
    with own_processes() as processes:
        seen = processes.submit(observe, setup, window).result().process_bytes
    if seen is None:
        pytest.skip("this system does not tell a process's peak")
    assert 0.99 * predicted <= seen <= 1.1 * predicted + scratch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("name", "micro"), [("digits", 32768), ("digits_cnn", 4096), ("dictionary", 128)])
def test_the_device_sees_what_was_predicted(name: str, micro: int, make_setup: Callable[..., Setup]) -> None:
    setup = make_setup(name, device="cuda")
    window = Window(micro, 2, setup.optimizers.adamw)
    predicted, seen = predict(Bench.prepare(setup), window), observe(setup, window)
    assert predicted == seen.tally
    assert seen.device_bytes is not None
    assert 0.99 * predicted.total <= seen.device_bytes <= 1.1 * predicted.total + 16 * 2**20


def test_bf16_halves_the_activations_of_a_network_of_convolutions(make_setup: Callable[..., Setup]) -> None:
    setup = make_setup("digits_cnn")
    bench = Bench.prepare(setup)
    full, half = (
        predict(bench, Window(256, 2, setup.optimizers.sgd, precision)).by_kind["activations"]
        for precision in ("float32", "bf16")
    )
    assert 0.4 < half / full < 0.7


def test_every_kind_is_what_arithmetic_says(setup: Setup) -> None:
    parameters = 4 * (64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10)
    steps_of_adamw = 6 * 4
    kinds = predict(Bench.prepare(setup), Window(1, 2, setup.optimizers.adamw)).by_kind
    assert kinds["parameters"] == kinds["gradients"] == parameters
    assert kinds["optimizer_state"] == 2 * parameters + steps_of_adamw
    assert kinds["inputs"] == 2 * (64 * 4 + 8)


@pytest.mark.parametrize("name", ["digits", "digits_cnn"])
def test_memory_but_for_inputs_does_not_grow_with_accumulation_steps(
    name: str, make_setup: Callable[..., Setup]
) -> None:
    setup = make_setup(name)
    bench = Bench.prepare(setup)
    peaks = {steps: predict(bench, Window(4, steps, setup.optimizers.sgd)) for steps in (2, 3, 16, 64)}
    but_inputs = {steps: peak.total - peak.by_kind["inputs"] for steps, peak in peaks.items()}
    of_losses = 16 * 64
    assert max(but_inputs.values()) - but_inputs[2] <= of_losses


def test_one_gradient_is_added_once_from_the_second_micro_batch_on(make_setup: Callable[..., Setup]) -> None:
    setup = make_setup("dictionary")
    bench = Bench.prepare(setup)
    one, two = (predict(bench, Window(2, steps, setup.optimizers.sgd)) for steps in (1, 2))
    grown = two.total - two.by_kind["inputs"] - one.total + one.by_kind["inputs"]
    assert 0 < grown <= one.by_kind["parameters"] + 1024


def test_activations_are_linear_in_the_micro_batch(make_setup: Callable[..., Setup]) -> None:
    setup = make_setup("digits_cnn")
    bench = Bench.prepare(setup)
    kinds = {micro: predict(bench, Window(micro, 2, setup.optimizers.sgd)).by_kind for micro in (64, 128, 512)}
    per_sample = {micro: by_kind["activations"] / micro for micro, by_kind in kinds.items()}
    assert per_sample[128] == pytest.approx(per_sample[64], rel=1e-3)
    assert per_sample[512] == pytest.approx(per_sample[64], rel=1e-3)


def test_a_window_that_keeps_its_graphs_shows_in_the_prediction(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.prepare(setup)
    right = bench.workload.objective
    kept: list[torch.Tensor] = []

    def leaky(model: nn.Module, batch: object) -> torch.Tensor:
        kept.append(model[:3](batch[0]))  # type: ignore[index]
        return right.loss_sum(model, batch)

    object.__setattr__(bench.workload, "objective", Objective(leaky, right.count))
    two, eight = (predict(bench, Window(64, steps, setup.optimizers.sgd)) for steps in (2, 8))
    assert eight.total - eight.by_kind["inputs"] > 1.2 * (two.total - two.by_kind["inputs"])


def test_recomputing_in_backward_lowers_the_activations(setup: Setup) -> None:
    class Recomputed(nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = checkpoint(super().forward, inputs, use_reentrant=False)
            return hidden

    def deep(kind: type[nn.Sequential]) -> int:
        bench = Bench.prepare(setup)
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
        object.__setattr__(bench.workload, "make_model", lambda: nn.Sequential(kind(*layers), nn.Linear(64, 10)))
        return predict(bench, Window(512, 2, setup.optimizers.sgd)).by_kind["activations"]

    assert deep(Recomputed) < 0.5 * deep(nn.Sequential)


def test_a_size_that_could_not_run_here_is_predicted_from_its_shape(setup: Setup) -> None:
    bench = Bench.prepare(setup)
    huge = predict(bench, Window(2**22, 2, setup.optimizers.sgd))
    some = predict(bench, Window(2**14, 2, setup.optimizers.sgd))
    assert huge.by_kind["activations"] == pytest.approx(2**8 * some.by_kind["activations"], rel=1e-3)


def test_another_device_rounds_as_its_allocator_does(setup: Setup) -> None:
    bench = Bench.prepare(setup)
    window = Window(1, 2, setup.optimizers.sgd)
    here, there = predict(bench, window), predict(bench, window, device="cuda")
    assert here.by_kind["parameters"] == 104488
    assert there.by_kind["parameters"] == sum(-(-4 * size // 512) * 512 for size in (8192, 128, 16384, 128, 1280, 10))


def test_a_model_that_reads_a_number_is_predicted(setup: Setup) -> None:
    bench = Bench.prepare(setup)
    right = bench.workload.objective

    def curious(model: nn.Module, batch: object) -> torch.Tensor:
        loss: torch.Tensor = right.loss_sum(model, batch)
        return loss if loss.item() > 0 else -loss

    object.__setattr__(bench.workload, "objective", Objective(curious, right.count))
    plain = predict(Bench.prepare(setup), Window(4, 2, setup.optimizers.sgd))
    assert predict(bench, Window(4, 2, setup.optimizers.sgd)) == plain


def test_a_size_that_depends_on_values_is_refused(setup: Setup) -> None:
    bench = Bench.prepare(setup)
    object.__setattr__(
        bench.workload,
        "objective",
        Objective(lambda model, batch: model(batch[0])[batch[1] > 4].sum(), lambda batch: len(batch[0])),
    )
    with pytest.raises(ConfigError, match=r"'digits' cannot be predicted, because .* gradaccum\.fit_micro_batch"):
        predict(bench, Window(4, 2, setup.optimizers.sgd))


def test_samples_past_the_end_of_the_data_are_taken_again(setup: Setup) -> None:
    inputs, labels = sample_batch(Bench.prepare(setup), 2000, enlarge=shape_only)
    assert inputs.shape == (2000, 64)
    assert labels.shape == (2000,)
    assert not inputs.is_meta


def test_a_huge_batch_has_a_shape_only_or_repeats_what_it_holds(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_memory, "MOST_REAL_SAMPLES", 3)
    bench = Bench.prepare(setup)
    shape, labels = sample_batch(bench, 8, enlarge=shape_only)
    assert shape.shape == (8, 64)
    assert shape.is_meta
    inputs, labels = sample_batch(bench, 8, enlarge=repeated)
    assert torch.equal(inputs, inputs[[0, 1, 2, 0, 1, 2, 0, 1]])
    assert torch.equal(labels, labels[[0, 1, 2, 0, 1, 2, 0, 1]])
    window = Window(8, 2, setup.optimizers.sgd)
    assert predict(bench, window) == observe(setup, window).tally


def test_moving_a_model_keeps_tied_weights_tied_and_buffers_there() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
            self.other.weight = self.one.weight
            self.norm = nn.BatchNorm1d(3)

    model = on_device(Tied(), torch.device("meta"))
    assert model.other.weight is model.one.weight
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert set(model.state_dict()) == set(Tied().state_dict())


def test_the_process_sees_what_is_allocated_and_freed_again() -> None:
    give_freed_memory_back()
    peak = ProcessPeak()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    del block
    above = peak.above()
    if above is None:
        pytest.skip("this system does not tell a process's peak")
    assert above == pytest.approx(64 * 2**20, rel=0.1)


def test_two_windows_are_enough_to_see_the_optimizer_s_state_beside_the_activations(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench.prepare(setup)
    peaks = {}
    predicted = predict(bench, Window(4096, 2, setup.optimizers.adamw)).total
    for count in (1, 2, 4):
        monkeypatch.setattr(window_memory, "WINDOWS", count)
        peaks[count] = predict(bench, Window(4096, 2, setup.optimizers.adamw)).total
    assert peaks[1] < peaks[2] == peaks[4] == predicted

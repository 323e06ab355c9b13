"""What is around a window: the user's autocast, a compiled training loop, several devices, limits of number formats."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from gradaccum import Accumulator, BatchError, ConfigError, NoiseScale, Objective, master_weights
from gradaccum.engine import gradients
from tests.engine.reference import CLASSIFICATION, assert_same, make_model, parameters_of, window_of


def sgd(model: nn.Module, **options: Any) -> Accumulator:
    objective = options.pop("objective", CLASSIFICATION)
    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.5), objective, **options)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("enabled", [True, False])
def test_an_autocast_around_the_loop_keeps_no_weights_of_before_the_step(precision: Any, enabled: bool) -> None:
    def losses(around: Callable[[], AbstractContextManager[Any]], inside: Callable[[], Any]) -> list[Tensor]:
        accumulator = sgd(make_model(torch.float32), precision=precision)
        with around():
            steps = []
            for _ in range(3):
                with inside():
                    steps.append(accumulator.step(window_of([4, 4], torch.float32)).loss)
            return steps

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=enabled)

    together, each = losses(autocast, nullcontext), losses(nullcontext, autocast)
    assert_same(together, each, rtol=0)
    assert len({float(loss) for loss in together}) == 3


@pytest.mark.filterwarnings("ignore")  # what torch says of itself while it compiles
def test_a_compiled_training_loop_steps_as_the_plain_one() -> None:
    plain, compiled = make_model(torch.float32), make_model(torch.float32)
    window = window_of([4, 3], torch.float32)
    expected = sgd(plain).step(window)
    step = torch.compile(sgd(compiled).step, backend="eager")(window)
    assert_same([step.loss, *parameters_of(compiled)], [expected.loss, *parameters_of(plain)])


def test_a_gradient_spread_over_devices_is_clipped_on_each() -> None:
    """The meta device stands for a second accelerator."""
    spread = [torch.ones(3), torch.ones(2, device="meta")]
    gradients.clip(spread, torch.tensor(10.0), 1.0)
    assert_same([spread[0]], [torch.full((3,), 0.1)], rtol=1e-6)


class TwoParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))


def test_a_norm_or_a_loss_beyond_its_type_is_infinite() -> None:
    objective = Objective(lambda model, batch: (model.first + model.second) * 3e38, lambda batch: 1)
    step = sgd(TwoParameters(), objective=objective).step([torch.ones(1)])
    assert step.grad_norm.isposinf()
    mixed = [torch.ones(2), torch.full((2,), 1e60, dtype=torch.float64)]
    assert_same([gradients.global_norm(mixed)], [torch.tensor(1e60 * 2**0.5, dtype=torch.float64)])


def test_a_count_that_no_seed_can_hold_is_refused() -> None:
    objective = Objective(lambda model, batch: model.first.square(), lambda batch: 1e-40)
    with pytest.raises(BatchError, match="Count targets in units"):
        sgd(TwoParameters(), objective=objective).step([torch.ones(1)])


def test_a_fraction_weighs_as_its_number_does() -> None:
    def terms(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"own": model(batch[0]).square().sum()}

    steps = [
        sgd(make_model(), objective=Objective(terms, lambda batch: {"own": 1}, {"own": weight})).step(window_of([4]))
        for weight in (Fraction(1, 4), 0.25)
    ]
    assert torch.equal(steps[0].loss, steps[1].loss)


def test_no_pass_holds_its_graph_through_the_next_forward() -> None:
    alive: list[ref[Any]] = []
    left: list[int] = []

    class Kept:
        """What a pass keeps by itself, beside saved tensors."""

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            left.append(sum(each() is not None for each in alive))
            ctx.kept = Kept()
            alive.append(ref(ctx.kept))
            return inputs.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0]

    model = make_model()
    objective = Objective(lambda m, batch: Noting.apply(m(batch[0])).square().sum(), lambda batch: len(batch[0]))
    sgd(model, objective=objective).step(window_of([4, 4, 4]))
    assert left == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_short_labels_are_labels(dtype: torch.dtype) -> None:
    found, expected = make_model(), make_model()
    window = window_of([4, 3])
    step = sgd(found).step([(inputs, labels.to(dtype)) for inputs, labels in window])
    assert_same([step.loss, *parameters_of(found)], [sgd(expected).step(window).loss, *parameters_of(expected)])


def test_an_overflow_at_the_least_scale_does_not_promise_a_smaller_one() -> None:
    objective = Objective(lambda model, batch: model.first * float("nan"), lambda batch: 1)
    accumulator = sgd(TwoParameters(), objective=objective, precision="fp16")
    reasons = [accumulator.step([torch.ones(1)]).skip_reason for _ in range(40)]
    assert reasons[0].endswith("which is halved now")
    assert "the least there is" in reasons[-1]


def test_a_schedule_that_is_over_loses_no_count_of_the_step_that_was_made() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)
    accumulator = Accumulator(model, optimizer, CLASSIFICATION, scheduler=schedule)
    accumulator.step(window_of([4]))
    accumulator.step(window_of([4]))
    with pytest.raises(ValueError, match="total steps"):
        accumulator.step(window_of([4]))
    assert accumulator.steps == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after_step": [None]}, "after_step is no list of functions"),
        ({"observer": NoiseScale}, "Give one such as NoiseScale"),
        ({"observer": 3}, "Give one such as NoiseScale"),
    ],
)
def test_parts_that_could_only_fail_later_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sgd(make_model(), **options)


def test_an_objective_of_no_functions_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be functions"):
        Objective(3, len)


def test_master_weights_that_would_lose_a_part_are_refused() -> None:
    with pytest.raises(ConfigError, match="float64"):
        master_weights(make_model(torch.float64))


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_a_model_compiled_in_place_with_cuda_graphs_is_refused() -> None:
    model = make_model()
    model.compile(mode="reduce-overhead")
    with pytest.raises(ConfigError, match="CUDA graphs"):
        sgd(model)

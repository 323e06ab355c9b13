"""What in a model or an objective makes a cut batch differ from the whole: randomness, mixing layers, the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.engine.batching import Batch, batch_size
from gradaccum.engine.objective import Objective
from gradaccum.engine.ranks import buffers_unchanged
from gradaccum.measurements.comparison import same


def called(name: str, module: nn.Module) -> str:
    """A layer's name and type."""
    return f"{name or 'the model'} ({type(module).__name__})"


ModelChange = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Quiet:
    """What is random in a model, and how to turn it off.

    Attributes:
        names: layers that draw random numbers, or words for what no layer shows; empty where nothing is random.
        apply: turns it off in a new model.
        still_random: whether that did not help.
        dropouts: those of the layers that the model must be in training mode for.
    """

    names: tuple[str, ...]
    apply: ModelChange
    still_random: bool
    dropouts: tuple[str, ...] = ()


def quieten(make_model: Callable[[], nn.Module], gradient: Callable[[nn.Module], Sequence[Tensor]]) -> Quiet:
    """Find the mildest change under which the gradient does not depend on the random seed."""

    def is_random(change: ModelChange) -> bool:
        one, other = (_seeded(seed, lambda: gradient(change(make_model()))) for seed in (1, 2))
        return not all(map(same, one, other))

    if not is_random(_unchanged):
        return Quiet((), _unchanged, still_random=False)
    layers = tuple(called(*layer) for layer in _dropouts(make_model()))
    if layers and not is_random(without_dropout):
        return Quiet(layers, without_dropout, still_random=False, dropouts=layers)
    return Quiet((*layers, "something outside the dropout layers"), frozen, still_random=is_random(frozen))


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout probability at 0."""
    for _, module in _dropouts(model):
        for name in ("p", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def frozen(model: nn.Module) -> nn.Module:
    """The model in evaluation mode, whatever mode is asked for later."""
    model.eval()
    for module in model.modules():
        module.train = lambda mode=True, module=module: module  # type: ignore[method-assign, misc]
    return model


def with_frozen_batch_norms(model: nn.Module) -> nn.Module:
    for _, module in batch_norms(model):
        frozen(module)
    return model


def batch_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers that normalise by the statistics of the micro-batch."""
    return (
        (name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training
    )


def mixing_module(model: nn.Module, objective: Objective, whole: Batch, *, pieces: Sequence[Batch]) -> str | None:
    """Name of the first module, in the order of computation, whose output for a sample depends on the other samples."""
    on_whole, on_pieces = (_outputs(model, objective, batches) for batches in ([whole], pieces))
    for name, output in on_whole.items():
        other = on_pieces.get(name)
        if other is not None and other.shape == output.shape and not same(output, other):
            return name.rpartition("#")[0]
    return None


def moving_buffers(model: nn.Module, gradient: Callable[[nn.Module], Sequence[Tensor]]) -> tuple[str, ...]:
    """Buffers that a forward pass changes, where they change the gradient of the next one; none where they do not."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    first, second = gradient(model), gradient(model)
    if all(map(same, first, second)):
        return ()
    return tuple(name for name, buffer in model.named_buffers() if not torch.equal(buffer, before.get(name, buffer)))


def is_separable(model: nn.Module, objective: Objective, whole: Batch, *, pieces: Sequence[Batch]) -> bool:
    """Whether loss sums and counts of the pieces add up to those of the whole, in every term."""
    added = torch.stack([_losses(model, objective, piece) for piece in pieces]).sum(0)
    counts = torch.tensor([objective.totals(pieces), objective.totals([whole])], dtype=torch.float64)
    return all(map(same, added, _losses(model, objective, whole))) and same(counts[0], counts[1])


@torch.no_grad()
def _losses(model: nn.Module, objective: Objective, batch: Batch) -> Tensor:
    with buffers_unchanged(model):  # so that no pass sees what another left
        return torch.stack([loss_sum.double() for loss_sum in objective.loss_sums(model, batch)])


@torch.no_grad()
def _outputs(model: nn.Module, objective: Objective, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Output of every call of every module, `name#call`, over the batches one after another, in order of completion."""
    found: dict[str, list[Tensor]] = {}
    hooks = []
    for batch in batches:
        calls: dict[str, int] = {}
        samples = batch_size(batch)

        def note(name: str, output: object, *, calls: dict[str, int] = calls, samples: int = samples) -> None:
            key = f"{name}#{calls.setdefault(name, 0)}"
            calls[name] += 1
            if isinstance(output, Tensor) and output.dim() and len(output) == samples:
                wide = torch.promote_types(output.dtype, torch.float64)  # whole numbers and truth values too
                found.setdefault(key, []).append(output.detach().to(wide, copy=True))

        hooks = [
            module.register_forward_hook(lambda _, __, output, name=name, note=note: note(name, output))
            for name, module in model.named_modules()
        ]
        with buffers_unchanged(model):  # so that no pass sees what another left
            objective.loss_sums(model, batch)
        for hook in hooks:
            hook.remove()
    return {key: torch.cat(outputs) for key, outputs in found.items() if len({o.shape[1:] for o in outputs}) == 1}


def _dropouts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        probability = (
            getattr(module, "p", None) if "Dropout" in type(module).__name__ else getattr(module, "dropout", None)
        )
        if isinstance(probability, float) and probability > 0:
            yield name, module


def _seeded(seed: int, compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return compute()


def _unchanged(model: nn.Module) -> nn.Module:
    return model

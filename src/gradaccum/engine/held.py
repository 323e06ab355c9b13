"""What an Accumulator was built on, and whether the model and the optimizer still are that."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.engine.precision import NativeGradients
from gradaccum.errors import ConfigError

REBUILD = "Build the optimizer and the Accumulator after the last change to the model."


class Held:
    """The parameters whose gradients a window clears, sums, clips and hands over.

    A module put in a parameter's place, or a conversion, makes others that nothing here would know of, and the
    optimizer would go on with dead ones. To look through the model each time would cost as much as a small window, so
    it is done in the first window and whenever other parameters got gradients than in the last, or of other types.

    Args:
        model: with the parameters as they are now.
        optimizer: over them, or over their master weights.
        gradients: where those are summed whose parameters are to be watched over.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, gradients: NativeGradients) -> None:
        self._model, self._optimizer, self._mastered = model, optimizer, gradients.mastered
        self._dtypes = {parameter: parameter.dtype for parameter in gradients.parameters}
        self._stepped = stepped_by(optimizer)
        self._trained: Sequence[torch.dtype | None] = ()

    def require_unchanged(self) -> None:
        """Before a window, at next to no cost: refuse parameters that joined the optimizer."""
        if self._stepped != (now := stepped_by(self._optimizer)):
            raise ConfigError(
                f"the optimizer steps {now} parameters, but had {self._stepped} when this Accumulator was built, and "
                "it would neither clear nor clip the gradients of the others. Build it after the last change to the "
                "optimizer."
            )

    def require_known(self, trained: Sequence[torch.dtype | None], found: Sequence[Tensor]) -> None:
        """After a window's backward passes, before anything is stepped: refuse gradients that went elsewhere.

        Args:
            trained: as `NativeGradients.trained` has it.
            found: the gradients.
        """
        if trained == self._trained:
            return
        for name, parameter in self._model.named_parameters():
            if parameter not in self._dtypes:
                raise ConfigError(
                    f"the model's parameter {name!r} is another than when this Accumulator was built (a module or a "
                    "parameter was replaced, or converted), and the optimizer would go on stepping the one that the "
                    f"model no longer uses. {REBUILD}"
                )
            if (built := self._dtypes[parameter]) is not parameter.dtype:
                raise ConfigError(
                    f"the model's parameter {name!r} is {parameter.dtype} now, but was {built} when this Accumulator "
                    "was built, so that gradients are summed, and the optimizer's state kept, in other types than it "
                    f"was asked for. {REBUILD}"
                )
            if self._mastered is not None and parameter.requires_grad and parameter not in self._mastered:
                raise ConfigError(
                    f"the model's parameter {name!r} is trained now, but was frozen when its master weights were made, "
                    "so it has none and would never change. Make them, then the optimizer and the Accumulator, anew."
                )
        for gradient in found:
            if gradient.is_sparse:
                raise ConfigError(
                    f"a parameter of shape {tuple(gradient.shape)} got a sparse gradient, whose norm and clip are not "
                    "defined here. Use sparse=False in the embedding that makes it."
                )
        self._trained = trained


def stepped_by(optimizer: Optimizer) -> int:
    """How many parameters an optimizer steps."""
    stepped = 0
    for group in optimizer.param_groups:
        stepped += len(group["params"])
    return stepped

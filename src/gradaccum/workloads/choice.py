"""Which workload params.yaml selects, and its options. Imports no torch until it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as validated

from gradaccum.errors import ConfigError
from gradaccum.workloads.factory import Factory

if TYPE_CHECKING:
    from gradaccum.workloads.workload import Workload

Size = Annotated[int, Field(strict=True, ge=1, lt=2**31)]

MOST_NUMBERS = 2**31
"""Of the synthetic workload's parameters and data together: 8 GiB in float32, before gradients and optimizer state."""


@validated(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class NoOptions:
    """A workload with nothing to set."""


@validated(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SyntheticOptions:
    """Sizes of the synthetic workload's inputs, hidden layers, classes and data."""

    in_features: Size
    hidden: Size
    out_features: Size
    samples: Size

    def __post_init__(self) -> None:
        parameters = self.hidden * (self.in_features + self.hidden + self.out_features)
        data = self.in_features * (self.samples + self.samples // 8)
        if parameters + data > MOST_NUMBERS:
            raise ConfigError(
                f"its parameters would be {parameters} numbers and its data {data}, together more than {MOST_NUMBERS} "
                f"(8 GiB in float32). Lower {'hidden' if parameters > data else 'samples or in_features'}."
            )


BUILT_IN: Mapping[str, type] = {
    "digits": NoOptions,
    "digits_cnn": NoOptions,
    "dictionary": NoOptions,
    "definitions": NoOptions,
    "contrastive": NoOptions,
    "synthetic": SyntheticOptions,
}


@dataclass(frozen=True)
class WorkloadChoice:
    """A workload by name: a built-in one, or `package.module:factory`, importable from the project's root.

    Attributes:
        name: as in params.yaml.
        options: of the built-in ones, each under its name; of the user's own, under its factory's name.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, section: Any) -> WorkloadChoice:
        """The `workload` section, checked without importing what it names."""
        if isinstance(section, WorkloadChoice):
            return section
        if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
            raise ConfigError(f"workload = {section!r} names none. Set workload.name to one of {_names()}.")
        name = section["name"]
        options = {key: _options(name, key, value) for key, value in section.items() if key != "name"}
        choice = cls(name, options)
        if name not in BUILT_IN:
            factory = choice.factory()
            factory.check(options.get(factory.name, {}))
        elif name not in options and BUILT_IN[name] is not NoOptions:
            raise ConfigError(f"workload.name is {name!r}, but workload.{name} is missing. Set its options there.")
        return choice

    def source(self) -> Path | None:
        """The file behind a factory of the user's own; None for a built-in workload. Imports nothing."""
        return None if self.name in BUILT_IN else self.factory().source()

    def factory(self) -> Factory:
        """The user's own."""
        module, _, name = self.name.partition(":")
        if not name:
            raise ConfigError(
                f"workload.name = {self.name!r} is unknown. Set it to one of {_names()} (the last: your own factory)."
            )
        return Factory(module, name)

    def load(self) -> Workload:
        """Import and make the workload."""
        if self.name in BUILT_IN:
            make = import_module(f"gradaccum.workloads.{self.name}").workload
            given = self.options.get(self.name)
            built: Workload = make() if given is None or isinstance(given, NoOptions) else make(given)
            return built
        factory = self.factory()
        return _require_workload(self.name, factory.make(self.options.get(factory.name, {})))


def _names() -> str:
    return ", ".join([*BUILT_IN, "package.module:factory"])


def _options(name: str, key: str, value: Any) -> Any:
    if key in BUILT_IN:
        nested: type = dict[str, BUILT_IN[key]]  # type: ignore[valid-type]  # so that errors name the key
        return TypeAdapter(nested).validate_python({key: value})[key]
    if key != name.partition(":")[2]:
        raise ConfigError(f"workload.{key} is unknown. Remove it, or correct its name: one of {_names()}.")
    if not isinstance(value, Mapping):
        raise ConfigError(f"workload.{key} = {value!r} are no options. Write them as `option: value`.")
    return dict(value)


def _require_workload(name: str, made: Any) -> Workload:
    from gradaccum.workloads.workload import Workload  # noqa: PLC0415 (needs torch)

    if not isinstance(made, Workload):
        raise ConfigError(f"workload.name = {name!r} returned a {type(made).__name__}. Return a gradaccum.Workload.")
    return made

"""A workload factory of the user's own, named `package.module:factory`: found and checked before it is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from inspect import Parameter, Signature, signature
from itertools import chain
from pathlib import Path
from typing import Any

from gradaccum.errors import ConfigError


@dataclass(frozen=True)
class Factory:
    """A function `name` of `module`, importable from the project's root."""

    module: str
    name: str

    @property
    def written(self) -> str:
        """As in params.yaml."""
        return f"{self.module}:{self.name}"

    def source(self) -> Path:
        """The file that holds it. Imports nothing."""
        spec = _find(self.module)
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"workload.name = {self.written!r}: no module {self.module!r} under {Path.cwd()} or among the "
                "installed ones. Give the name by which `import` finds it from the project's root."
            )
        return Path(spec.origin)

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse a file that is no Python, a name that it lacks, and options that its function does not take.

        What only running the file can tell is left to `make`.
        """
        source = self.source()
        if source.suffix != ".py":
            return
        try:
            tree = ast.parse(source.read_bytes())
        except SyntaxError as error:
            raise ConfigError(
                f"workload.name = {self.written!r}: {source}, line {error.lineno}: {error.msg}. Correct it there."
            ) from error
        names = set(_names(tree))
        if not names & {self.name, "*", "__getattr__"}:
            raise self._lacks()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == self.name and not node.decorator_list:
                self._refuse(options, _signature(node.args))

    def make(self, options: Mapping[str, Any]) -> Any:
        """Import and call it."""
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        function = getattr(import_module(self.module), self.name, None)
        if function is None:
            raise self._lacks()
        self._refuse(options, signature(function))
        return function(**options)

    def _lacks(self) -> ConfigError:
        return ConfigError(f"workload.name = {self.written!r}: {self.module} has no {self.name!r}. Correct the name.")

    def _refuse(self, options: Mapping[str, Any], takes: Signature) -> None:
        try:
            takes.bind(**options)
        except TypeError as error:
            raise ConfigError(
                f"workload.{self.name} = {dict(options)} does not fit {self.module}.{self.name}{takes}: {error}. "
                f"Correct the options under workload.{self.name}, or the function."
            ) from None


def _find(module: str) -> ModuleSpec | None:
    """Find a module's file without running its parent packages."""
    places: list[str] | None = [str(Path.cwd()), *sys.path]
    spec = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
    return spec


def _names(tree: ast.Module) -> chain[str]:
    """Whatever a file may bind, anywhere in it."""
    nodes = list(ast.walk(tree))
    aliases = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    return chain(
        (node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)),
        (node.id for node in nodes if isinstance(node, ast.Name)),
        (alias.asname or alias.name for alias in aliases),
    )


def _signature(arguments: ast.arguments) -> Signature:
    """What a function takes, its defaults as they are written."""
    required = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    defaults = iter([*[None] * required, *arguments.defaults, *arguments.kw_defaults])
    return Signature(
        [
            *(_parameter(each, Parameter.POSITIONAL_ONLY, next(defaults)) for each in arguments.posonlyargs),
            *(_parameter(each, Parameter.POSITIONAL_OR_KEYWORD, next(defaults)) for each in arguments.args),
            *(_parameter(each, Parameter.VAR_POSITIONAL) for each in [arguments.vararg] if each),
            *(_parameter(each, Parameter.KEYWORD_ONLY, next(defaults)) for each in arguments.kwonlyargs),
            *(_parameter(each, Parameter.VAR_KEYWORD) for each in [arguments.kwarg] if each),
        ]
    )


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None = None) -> Parameter:
    return Parameter(argument.arg, kind, default=_Written(ast.unparse(default)) if default else Parameter.empty)


class _Written(str):
    """An expression that shows as it was written."""

    __slots__ = ()

    __repr__ = str.__str__

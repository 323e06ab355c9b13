"""params.yaml, one section at a time, as validated frozen configs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from gradaccum.errors import ConfigError

PARAMS = Path("params.yaml")

Config = TypeVar("Config")


def read_params(path: Path = PARAMS) -> dict[str, Any]:
    """The whole file, not validated; read as DVC reads it, or what is measured would not be what dvc.lock records."""
    try:
        data = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing from {Path.cwd()}. Run from the project's root.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Make it a file that you may read.") from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise _no_yaml(path, error) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no sections. Restore it with `git checkout {path}`.")
    return data


def _no_yaml(path: Path, error: Exception) -> ConfigError:
    if isinstance(error, MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return ConfigError(
            f"{path}, line {mark.line + 1}, column {mark.column + 1}: {error.problem}. Correct it there."
        )
    return ConfigError(f"{path} is no YAML: {error}. Correct it, or restore it with `git checkout {path}`.")


def together(*checks: Callable[[], object]) -> None:
    """Run every check, then raise what all of them found.

    Raises:
        ConfigError: a check raised one; its lines are those of all.
    """
    problems = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def section(params: Mapping[str, Any], name: str, of: type[Config], *, file: Path = PARAMS) -> Config:
    """One section as its config.

    Raises:
        ConfigError: the section is missing, or a key of it is unknown, missing, of a wrong type or out of range.
    """
    if name not in params:
        raise ConfigError(f"{file} has no section {name!r}, which the stage of that name reads. Add it.")
    return _validate(params[name], of, file=file, where=(name,))


def shared(params: Mapping[str, Any], of: type[Config], *, file: Path = PARAMS) -> Config:
    """The top-level keys that are fields of `of`, as one config."""
    names = {field.name for field in fields(of)}  # type: ignore[arg-type]
    return _validate({name: value for name, value in params.items() if name in names}, of, file=file, where=())


def _validate(data: Any, of: type[Config], *, file: Path, where: tuple[str, ...]) -> Config:
    try:
        return TypeAdapter(of).validate_python(data)
    except ValidationError as error:
        problems = [_problem(file, where, item) for item in _without_echoes(error)]
        raise ConfigError("\n".join(problems)) from None


def _without_echoes(error: ValidationError) -> list[dict[str, Any]]:
    """Its items; a list that is too short only because elements of it are wrong is none of them."""
    items: list[dict[str, Any]] = [dict(item) for item in error.errors(include_url=False)]
    wrong = {item["loc"][:depth] for item in items for depth in range(len(item["loc"]))}
    return [item for item in items if item["type"] != "too_short" or item["loc"] not in wrong]


def _problem(file: Path, where: tuple[str, ...], item: dict[str, Any]) -> str:
    """One line: file, section and key, value, what is allowed."""
    key = ".".join(str(part) for part in (*where, *item["loc"]))
    match item["type"]:
        case "missing":
            return f"{file}: {key} is missing. Add it."
        case "unexpected_keyword_argument" | "extra_forbidden":
            return f"{file}: {key} = {item['input']!r} is unknown. Remove it, or correct its name."
        case "value_error":
            return f"{file}: {key or 'top level'}: {item['ctx']['error']}"
        case _:
            allowed = item["msg"].replace("Input should", "it should").replace("Tuple should", "List should")
            return f"{file}: {key} = {item['input']!r} is not allowed: {allowed}."


def refuse_unknown(params: Mapping[str, Any], known: Collection[str], *, file: Path = PARAMS) -> None:
    """Refuse top-level keys that nothing reads."""
    unknown = [name for name in params if name not in known]
    if unknown:
        raise ConfigError(
            f"{file}: {', '.join(map(repr, unknown))} is read by no stage. Remove it, or correct its name: "
            f"one of {', '.join(sorted(known))}."
        )

"""The only reader and writer of result files: atomic, keys sorted, numbers finite."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradaccum.errors import GradaccumError
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome, Table

OUTPUTS = Path("outputs")


class ResultFileError(GradaccumError, ValueError):
    """A result file that is missing, broken, or would be."""


def write_outcome(outcome: Outcome, root: Path = OUTPUTS) -> list[Path]:
    """Write a stage's metrics.json, accum-curve.json and tables; returns their paths."""
    folder = root / outcome.curve.stage
    paths = [
        write_json(folder / "metrics.json", outcome.metrics),
        write_json(folder / "accum-curve.json", outcome.curve.to_json()),
    ]
    return paths + [write_csv(folder / f"{name}.csv", rows) for name, rows in outcome.tables.items()]


def write_json(path: Path, data: Mapping[str, Any]) -> Path:
    """Write JSON that any reader takes: sorted keys, no NaN or infinity."""
    try:
        text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
    except ValueError as error:
        raise ResultFileError(f"{path}: a number is not finite, which JSON cannot hold. Write null instead.") from error
    return write_text(path, text + "\n")


def write_csv(path: Path, rows: Table) -> Path:
    """Write rows of equal keys; null becomes an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        if any(isinstance(value, float) and not math.isfinite(value) for value in row.values()):
            raise ResultFileError(f"{path}: the row {dict(row)} has a number that is not finite. Write null instead.")
        writer.writerow(row)
    return write_text(path, text.getvalue())


def write_text(path: Path, text: str) -> Path:
    """Write a whole file or none: into a temporary file in the same folder, then put in its place."""
    return write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> Path:
    """As `write_text`, for bytes.

    Raises:
        ResultFileError: the folder or the disk does not take it.
    """
    try:
        return _replace(path, data)
    except OSError as error:
        raise ResultFileError(
            f"{path} cannot be written: {error.strerror or error}. Make room, or the folder writable; outputs that DVC "
            "removed come back with `git checkout . && dvc checkout --force`."
        ) from error


def _replace(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ResultFileError(f"{path} is missing. Run `dvc repro`, or `dvc checkout` to get a cached one.") from error
    except ValueError as error:
        raise ResultFileError(f"{path} is no JSON ({error}). Run `dvc repro --force` to write it anew.") from error
    if not isinstance(data, dict):
        raise ResultFileError(f"{path} holds a {type(data).__name__}, not an object. Run `dvc repro --force`.")
    return data


def read_curve(path: Path) -> Curve:
    return Curve.from_json(read_json(path))


def read_csv(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError as error:
        raise ResultFileError(f"{path} is missing. Run `dvc repro`, or `dvc checkout` to get a cached one.") from error

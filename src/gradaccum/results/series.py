"""A stage's metrics over steps, as its measurement gave them to the tracker, read back from its tables and curve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from gradaccum.results.curve import Curve
from gradaccum.results.outcome import StepSeries
from gradaccum.results.sentences import QUARTERS

Rows = Sequence[Mapping[str, str]]
"""As a CSV file has them: text, empty for null."""

Reader = Callable[[Curve, Rows], Iterator[StepSeries]]


def read_back(curve: Curve, tables: Mapping[str, Rows]) -> list[StepSeries]:
    """The series of all tables that hold some; `tables` by file name without ending."""
    readers = {"losses": _losses, "learning": _learning, "frontier": _frontier}
    return [line for name, read in readers.items() if tables.get(name) for line in _read(read, curve, tables[name])]


def _read(read: Reader, curve: Curve, rows: Rows) -> list[StepSeries]:
    try:
        return list(read(curve, rows))
    except KeyError:  # a past version's table, of other columns: its states are published without
        return []


def _losses(curve: Curve, rows: Rows) -> Iterator[StepSeries]:
    """An arm that diverged has no rows from there on: its losses were no numbers, as long as the others went on."""
    del curve
    last = max(int(row["step"]) for row in rows)
    for (series, accum_steps), own in _grouped(rows, "series", "accum_steps").items():
        losses = [_number(row["loss"]) for row in own]
        steps = range(1, last + 1)
        yield StepSeries(f"{series}/loss/n{accum_steps}", steps, [*losses, *[None] * (last - len(losses))])


def _learning(curve: Curve, rows: Rows) -> Iterator[StepSeries]:
    for (series, batch), own in _grouped(rows, "series", "effective_batch").items():
        samples, steps = ([int(row[axis]) for row in own] for axis in ("samples", "steps"))
        for name in ("validation_loss", "validation_accuracy", "train_loss"):
            yield from _known(f"{series}/{name}_by_samples/b{batch}", samples, [_number(row[name]) for row in own])
        losses = [_number(row["validation_loss"]) for row in own]
        yield StepSeries(f"{series}/validation_loss_by_steps/b{batch}", steps, losses)
    yield from _noise_scales(curve, samples=max(int(row["samples"]) for row in rows))


def _noise_scales(curve: Curve, *, samples: int) -> Iterator[StepSeries]:
    """In the middle of each quarter of the samples."""
    middles = [samples * (2 * number + 1) // 8 for number in range(len(QUARTERS))]
    for point in curve.points:
        name = f"{point['series']}/noise_scale_by_samples/b{point['effective_batch']}"
        yield from _known(name, middles, [point.get(quarter) for quarter in QUARTERS])


def _frontier(curve: Curve, rows: Rows) -> Iterator[StepSeries]:
    del curve
    along = sorted(rows, key=lambda row: int(row["micro_batch"]))
    micro = [int(row["micro_batch"]) for row in along]
    for name in ("samples_per_sec", "median_step_ms", "mfu"):
        yield StepSeries(f"frontier/{name}", micro, [_number(row[name]) for row in along])


def _known(name: str, steps: Sequence[int], values: Sequence[float | None]) -> Iterator[StepSeries]:
    known = [(at, value) for at, value in zip(steps, values, strict=True) if value is not None]
    if known:
        at, numbers = zip(*known, strict=True)
        yield StepSeries(name, at, numbers)


def _grouped(rows: Rows, *keys: str) -> dict[tuple[str, ...], list[Mapping[str, str]]]:
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _number(text: str) -> float | None:
    return float(text) if text else None

from __future__ import annotations

import pytest

from gradaccum.errors import ConfigError
from gradaccum.results.sizes import grouped, parse_bytes, shown_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("24GB", 24 * 10**9),
        ("1.5 kib", 1536),
        ("2T", 2 * 10**12),
        ("8589934592", 2**33),
        ("100B", 100),
        (".5GiB", 2**29),
    ],
)
def test_an_amount_is_read_in_binary_and_decimal_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 apples", "-1GiB", "1.2.3GiB", "8iB", "1e3GiB", "."])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no amount of memory\. Write it as 8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.1B", "99999999TB", "9" * 400])
def test_an_amount_that_no_device_has_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no memory that a device has"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "meant"), [("8", "8GiB"), ("0.5", "0.5GiB"), ("1", "1GiB"), ("8192", "8192MiB")])
def test_a_small_number_without_a_unit_was_not_meant_in_bytes(text: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{text}' has no unit, .* Did you mean {meant}\?"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("number", "shown"),
    [(26449.7, "26 450"), (1234567.0, "1 234 567"), (999.6, "1 000"), (42.123, "42.1"), (0.5, "0.5")],
)
def test_thousands_stand_apart(number: float, shown: str) -> None:
    assert grouped(number) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 * 2**30, "8 GiB"), (3 * 2**50, "3072 TiB")],
)
def test_an_amount_is_shown_in_the_largest_unit_below_it(size: int, shown: str) -> None:
    assert shown_bytes(size) == shown

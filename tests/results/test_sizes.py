from __future__ import annotations

import pytest

from gradaccum.errors import ConfigError
from gradaccum.results.sizes import parse_bytes, shown_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("24GB", 24 * 10**9),
        ("1.5 kib", 1536),
        ("2T", 2 * 10**12),
        ("100", 100),
        ("100B", 100),
    ],
)
def test_an_amount_is_read_in_binary_and_decimal_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 apples", "-1GiB", "0", "1.2.3GiB", "8iB"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no amount of memory\. Write it as 8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 * 2**30, "8 GiB"), (3 * 2**50, "3072 TiB")],
)
def test_an_amount_is_shown_in_the_largest_unit_below_it(size: int, shown: str) -> None:
    assert shown_bytes(size) == shown

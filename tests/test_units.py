"""Sizes on the command line mean what people expect."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanmoe.errors import UsageError
from leanmoe.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4GiB", 4 << 30),
        ("4G", 4 << 30),
        ("4gb", 4 * 10**9),
        ("1.5GiB", 3 << 29),
        ("512", 512),
        (" 7 MiB ", 7 << 20),
    ],
)
def test_sizes_are_understood(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "4 apples", "-1GiB", "0", "GiB", "1e9", "nan", "0.0001", "9" * 40])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)


@given(st.integers(1, 2**50))
def test_a_plain_number_is_bytes_and_every_size_can_be_shown(n: int) -> None:
    assert parse_bytes(str(n)) == n
    assert format_bytes(n).split()[1] in {"B", "KiB", "MiB", "GiB", "TiB"}

"""Byte sizes as people write them."""

import re
from decimal import Decimal

from leanmoe.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    **{p: 1024**i for i, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)},
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
}


def parse_bytes(text: str | int) -> int:
    """Bytes in `text`: "4GiB", "4G" (binary), "4GB" (decimal), "512MiB", or a plain number of bytes.

    Raises `UsageError` for anything else, for zero and for a fraction of a byte.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,6})?)\s*([a-zA-Z]*)\s*", str(text))
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None or (value := int(Decimal(match[1]) * factor)) <= 0:
        raise UsageError(f"'{text}' is not a size in bytes; write it like 4GiB, 800MiB or 4GB")
    return value


def format_bytes(n: int) -> str:
    """`n` bytes in the binary unit that keeps it readable: 1536 -> "1.5 KiB"."""
    if abs(n) < 1024:
        return f"{n} B"
    value = float(n)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1024 or unit == "TiB":
            break
    return f"{value:.1f} {unit}" if abs(value) < 100 else f"{value:.0f} {unit}"

"""Writes GGUF key-value pairs from Python values."""

import struct
from collections.abc import Sequence
from typing import Any

from leanmoe.errors import FormatError
from leanmoe.formats.gguf_header import KIND_ARRAY, KIND_BOOL, KIND_STRING, KIND_UINT32

_INT32, _FLOAT32 = 5, 6
Value = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str]


def encode_pair(key: str, value: Value) -> bytes:
    """The bytes of a key-value pair: bool, u32, f32, string, or an array of bool, i32, f32 or strings.

    Raises `FormatError` for a value that none of these can hold.
    """
    try:
        if isinstance(value, str | bool | int | float):
            kind = KIND_UINT32 if type(value) is int else _kind(value)
            return _string(key) + struct.pack("<I", kind) + _item(kind, value)
        items = list(value)
        kind = _kind(items[0]) if items else _INT32
        if kind == _INT32 and any(isinstance(item, float) for item in items):
            kind = _FLOAT32
        head = struct.pack("<IIQ", KIND_ARRAY, kind, len(items))
        return _string(key) + head + b"".join([_item(kind, item) for item in items])
    except (struct.error, TypeError, AttributeError, UnicodeError, OverflowError) as error:
        raise FormatError(
            f"{key}: the value {str(value)[:80]!r} cannot be written to a GGUF: {error}"
        ) from None


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return KIND_BOOL
    if isinstance(value, str):
        return KIND_STRING
    return _FLOAT32 if isinstance(value, float) else _INT32


def _item(kind: int, value: Any) -> bytes:
    if kind == KIND_STRING:
        return _string(value)
    return struct.pack({KIND_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", KIND_BOOL: "<?"}[kind], value)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw

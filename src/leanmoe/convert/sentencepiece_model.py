"""Reads the pieces of a SentencePiece `tokenizer.model`.

Source: the protobuf wire format, and sentencepiece_model.proto: ModelProto.pieces = 1 {piece = 1, score = 2, type = 3}.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from leanmoe.errors import FormatError, UsageError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
MAX_BYTES = 256 << 20


def read_pieces(path: Path) -> Iterator[tuple[str, float, int]]:
    """Text, score and type (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte) of each piece in order.

    Raises `UsageError` if there is no such file and `FormatError` if it is malformed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        for number, piece in _fields(data):
            if number == 1 and isinstance(piece, bytes):
                fields = dict(_fields(piece))
                text, score, kind = fields.get(1, b""), fields.get(2, b"\0\0\0\0"), fields.get(3, 1)
                if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
                    raise ValueError("a piece's fields have other types")
                yield text.decode(), struct.unpack("<f", score)[0], kind
    except (ValueError, IndexError, struct.error) as error:
        raise FormatError(f"{path}: is no SentencePiece model: {error}") from None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"unknown wire type {kind}")
        if at + length > len(data):
            raise ValueError("cut short")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")

"""Reads the header of one GGUF file: counts, key-value pairs and tensor infos. Tensor data is never touched.

Source: the GGUF format, versions 2 and 3, little endian. Every count, length and offset in the file is
untrusted: it is compared with the size of the file before anything is allocated or looped over.
"""

import io
import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
import numpy.typing as npt

from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.formats.consumed import HEAD_BYTES, MAGIC, consumer_of, unmarked
from leanmoe.formats.quant_types import QuantType, quant_type

DEFAULT_ALIGNMENT = 32
# Real headers take tens of MB at most (a vocabulary of 260,000 with its merges: 15 MB). The limits keep a
# hostile file from costing memory or time.
MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1024
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NESTING = 4
MAX_NESTED_ARRAYS = 1 << 18
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
_FIRST_READ = 1 << 20

KIND_UINT32, KIND_BOOL, KIND_STRING, KIND_ARRAY = 4, 7, 8, 9
_NUMBERS: dict[int, tuple[struct.Struct, str]] = {
    0: (struct.Struct("<B"), "<u1"),
    1: (struct.Struct("<b"), "<i1"),
    2: (struct.Struct("<H"), "<u2"),
    3: (struct.Struct("<h"), "<i2"),
    KIND_UINT32: (struct.Struct("<I"), "<u4"),
    5: (struct.Struct("<i"), "<i4"),
    6: (struct.Struct("<f"), "<f4"),
    KIND_BOOL: (struct.Struct("<?"), "<u1"),
    10: (struct.Struct("<Q"), "<u8"),
    11: (struct.Struct("<q"), "<i8"),
    12: (struct.Struct("<d"), "<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_KIND_COUNT = struct.Struct("<IQ")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `ne` in ggml order (fastest dimension first), `offset` in bytes from the start of `path`.

    Trailing dimensions of 1 are kept as found.
    """

    name: str
    ne: tuple[int, ...]
    qtype: QuantType
    path: Path
    offset: int
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in torch order: `ne` reversed."""
        return self.ne[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """The header of one file. `data_start`: the absolute byte offset of its tensor data."""

    metadata: Mapping[str, Any]
    raw_kv: Mapping[str, memoryview]
    tensors: Mapping[str, TensorInfo]
    data_start: int


class StringArray(Sequence[str]):
    """An array of strings in a GGUF header, decoded when they are looked at; behaves as a list of `str`.

    They are kept once one is looked up by its place, not where all are gone through: a vocabulary's merges, which are
    wanted once, take ten megabytes and more. Raises `FormatError` on access if one of the strings is not UTF-8.
    """

    def __init__(self, buffer: bytearray, start: int, count: int, label: str) -> None:
        self._buffer, self._start, self._count, self._label = buffer, start, count, label

    @cached_property
    def _strings(self) -> list[str]:
        return list(self._decoded())

    def _decoded(self) -> Iterator[str]:
        buffer, position, length_at = self._buffer, self._start, _U64.unpack_from
        for i in range(self._count):
            end = position + 8 + length_at(buffer, position)[0]
            try:
                yield buffer[position + 8 : end].decode()
            except UnicodeDecodeError as error:
                raise FormatError(f"{self._label}: string {i} is not UTF-8 ({error.reason})") from None
            position = end

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._strings[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._strings) if "_strings" in vars(self) else self._decoded()

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<StringArray of {self._count}>"


class _Cursor:
    """A position in a file's header. Reads ahead in doubling steps, within the file and the limit."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.buffer = bytearray()
        self.position = 0
        self.nested_arrays = 0

    def error(self, what: str) -> FormatError:
        return FormatError(f"{self.path}: {what}")

    def need(self, end: int, what: str) -> None:
        """Makes bytes up to `end` available."""
        if end <= len(self.buffer):
            return
        if end > self.size:
            raise self.error(
                f"{what} needs bytes up to {end}, but the file has {self.size}; it is cut short or damaged: "
                "fetch it again"
            )
        if end > MAX_HEADER_BYTES:
            raise self.error(
                f"{what} ends at byte {end}; a GGUF header longer than {MAX_HEADER_BYTES} is refused"
            )
        wanted = max(end, 2 * len(self.buffer), _FIRST_READ)
        wanted = min(wanted, self.size, MAX_HEADER_BYTES)
        self.file.seek(len(self.buffer))
        self.buffer += self.file.read(wanted - len(self.buffer))
        if end > len(self.buffer):
            raise self.error(f"{what} needs bytes up to {end}, but reading ended at {len(self.buffer)}")

    def unpack(self, fmt: struct.Struct, what: str) -> tuple[Any, ...]:
        start = self.position
        self.need(start + fmt.size, what)
        self.position = start + fmt.size
        return fmt.unpack_from(self.buffer, start)

    def raw_string(self, what: str, limit: int = MAX_HEADER_BYTES) -> bytes:
        (length,) = self.unpack(_U64, what)
        if length > limit:
            raise self.error(f"{what} is {length} bytes long; at most {limit} are allowed")
        start, self.position = self.position, self.position + length
        self.need(self.position, what)
        return bytes(self.buffer[start : self.position])

    def name(self, what: str, limit: int) -> str:
        raw = self.raw_string(what, limit)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8: {raw[:64]!r}") from None
        if not text or "\0" in text:
            raise self.error(f"{what} is {text!r}; a non-empty name without NUL was wanted")
        return text


def read_header(path: Path, consumer: int | None = None) -> Header:
    """The header of the one file `path`; a shard is read alone.

    A file that is being freed while it is packed is refused, unless `consumer` is who frees it.

    Raises `FormatError`, `UnsupportedError` and `OSError`.
    """
    with path.open("rb") as file:
        cursor = _Cursor(file, path, os.fstat(file.fileno()).st_size)
        _accept_mark(cursor, consumer)
        return _read(cursor)


def parse_header(header: bytes, path: Path, size: int) -> Header:
    """The header in `header`, of a file `path` that would have `size` bytes. Raises as `read_header`."""
    return _read(_Cursor(io.BytesIO(header), path, size))


def _read(cursor: _Cursor) -> Header:
    tensor_count, key_count = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for index in range(key_count):
        start = cursor.position
        key = cursor.name(f"the name of key {index} of {key_count}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"key '{key}' appears twice")
        (kind,) = cursor.unpack(_U32, f"the type of key '{key}'")
        metadata[key] = _read_value(cursor, kind, f"key '{key}'")
        spans[key] = (start, cursor.position)
    alignment = _alignment(cursor, metadata)
    entries = [_read_tensor_entry(cursor, index, tensor_count) for index in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = _place_tensors(cursor, entries, data_start, alignment)
    del cursor.buffer[cursor.position :]
    whole = memoryview(cursor.buffer).toreadonly()
    raw_kv = {key: whole[start:end] for key, (start, end) in spans.items()}
    return Header(metadata, raw_kv, tensors, data_start)


def _accept_mark(cursor: _Cursor, consumer: int | None) -> None:
    """Takes the mark off a header in memory if it is that of `consumer`, and refuses any other."""
    if cursor.size < HEAD_BYTES:
        return
    cursor.need(HEAD_BYTES, "the magic")
    if (found := consumer_of(bytes(cursor.buffer[:HEAD_BYTES]))) is None:
        return
    if found != consumer:
        raise cursor.error(
            "parts of it were freed by lean pack --consume, so it is no whole model any more; run that command "
            "again, with the same name for the pack, to go on (if the pack's .partial is gone, fetch the model again)"
        )
    cursor.buffer[:HEAD_BYTES] = unmarked(bytes(cursor.buffer[:HEAD_BYTES]))


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    cursor.need(4, "the magic")
    magic = bytes(cursor.buffer[:4])
    if magic != MAGIC:
        raise cursor.error(f"starts with {magic!r}, not {MAGIC!r}: this is not a GGUF file")
    cursor.position = 4
    (version,) = cursor.unpack(_U32, "the version")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version:
            raise UnsupportedError(
                f"{cursor.path}: big-endian GGUF; only little-endian files are read: convert it"
            )
        raise UnsupportedError(f"{cursor.path}: GGUF version {version}; versions 2 and 3 are read")
    (tensor_count,) = cursor.unpack(_U64, "the tensor count")
    (key_count,) = cursor.unpack(_U64, "the key count")
    # The smallest tensor info takes 24 bytes, the smallest key 13.
    for count, limit, least, what in (
        (tensor_count, MAX_TENSORS, 24, "tensors"),
        (key_count, MAX_KEYS, 13, "keys"),
    ):
        if count > limit or count * least > cursor.size - cursor.position:
            raise cursor.error(
                f"claims {count} {what}; a file of {cursor.size} bytes holds fewer, "
                f"and at most {limit} are read"
            )
    return tensor_count, key_count


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(
            f"general.alignment is {alignment!r}; a power of two up to {MAX_ALIGNMENT} was wanted"
        )
    return alignment


def _read_value(cursor: _Cursor, kind: int, what: str, depth: int = 0) -> Any:
    if kind in _NUMBERS:
        return cursor.unpack(_NUMBERS[kind][0], what)[0]
    if kind == KIND_STRING:
        raw = cursor.raw_string(what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            _log.warning("%s: %s is not UTF-8; its invalid bytes are read as U+FFFD", cursor.path, what)
            return raw.decode(errors="replace")
    if kind != KIND_ARRAY:
        raise cursor.error(f"{what} has type {kind}; types 0 to 12 are known")
    if depth == MAX_NESTING:
        raise cursor.error(f"{what} nests arrays deeper than {MAX_NESTING}")
    item_kind, count = cursor.unpack(_KIND_COUNT, what)
    least = 8 if item_kind == KIND_STRING else 12 if item_kind == KIND_ARRAY else 1
    if count * least > cursor.size - cursor.position:
        raise cursor.error(
            f"{what} claims {count} items; the file has {cursor.size - cursor.position} bytes left"
        )
    if item_kind in _NUMBERS:
        return _read_numbers(cursor, item_kind, count, what)
    if item_kind == KIND_STRING:
        start = cursor.position
        _skip_strings(cursor, count, what)
        return StringArray(cursor.buffer, start, count, f"{cursor.path}: {what}")
    if item_kind == KIND_ARRAY:
        cursor.nested_arrays += count
        if cursor.nested_arrays > MAX_NESTED_ARRAYS:
            raise cursor.error(
                f"{what} holds arrays of arrays; at most {MAX_NESTED_ARRAYS} inner ones are read"
            )
        return [_read_value(cursor, KIND_ARRAY, what, depth + 1) for _ in range(count)]
    raise cursor.error(f"{what} is an array of type {item_kind}; types 0 to 12 are known")


def _read_numbers(cursor: _Cursor, kind: int, count: int, what: str) -> npt.NDArray[Any]:
    fmt, dtype = _NUMBERS[kind]
    start, end = cursor.position, cursor.position + count * fmt.size
    cursor.need(end, what)
    cursor.position = end
    values = np.frombuffer(bytes(cursor.buffer[start:end]), dtype=dtype)
    return values != 0 if kind == KIND_BOOL else values


def _skip_strings(cursor: _Cursor, count: int, what: str) -> None:
    """Moves past `count` strings. One tight loop: vocabularies have 250,000 of them."""
    length_at, done = _U64.unpack_from, 0
    while done < count:
        cursor.need(cursor.position + 8, f"string {done} of {what}")
        buffer, position = cursor.buffer, cursor.position
        try:
            for index in range(done, count):
                done = index
                position += 8 + length_at(buffer, position)[0]
            done = count
        except (struct.error, OverflowError):  # past the bytes read so far: read more, go on
            pass
        cursor.position = position
    cursor.need(cursor.position, what)


def _read_tensor_entry(
    cursor: _Cursor, index: int, count: int
) -> tuple[str, tuple[int, ...], QuantType, int]:
    """Name, ne, type and relative offset of the next tensor info."""
    name = cursor.name(f"the name of tensor {index} of {count}", MAX_NAME_BYTES)
    what = f"tensor '{name}'"
    (n_dims,) = cursor.unpack(_U32, what)
    if n_dims > MAX_DIMS:
        raise cursor.error(f"{what} has {n_dims} dimensions; at most {MAX_DIMS} are allowed")
    ne = cursor.unpack(struct.Struct(f"<{n_dims}Q"), what) or (1,)
    type_id, offset = cursor.unpack(struct.Struct("<IQ"), what)
    elements = 1
    for n in ne:
        elements *= n
    if not 0 < elements < 1 << 63:
        raise cursor.error(f"{what} has dimensions {ne}; their product must lie between 1 and 2^63")
    try:
        return name, ne, quant_type(type_id), offset
    except UnsupportedError as error:
        raise UnsupportedError(f"{cursor.path}: {what}: {error}") from None


def _place_tensors(
    cursor: _Cursor,
    entries: list[tuple[str, tuple[int, ...], QuantType, int]],
    data_start: int,
    alignment: int,
) -> dict[str, TensorInfo]:
    """The tensors by name, after checking that each lies in the file, aligned, and over no other."""
    tensors: dict[str, TensorInfo] = {}
    for name, ne, qtype, offset in entries:
        try:
            row_bytes = qtype.row_bytes(ne[0])
        except FormatError as error:
            raise cursor.error(f"tensor '{name}': {error}") from None
        nbytes = row_bytes
        for n in ne[1:]:
            nbytes *= n
        if name in tensors:
            raise cursor.error(f"tensor '{name}' appears twice")
        if offset % alignment:
            raise cursor.error(f"tensor '{name}' starts at {offset}, which is not a multiple of {alignment}")
        if data_start + offset + nbytes > cursor.size:
            raise cursor.error(
                f"tensor '{name}' needs bytes up to {data_start + offset + nbytes}, but the file has "
                f"{cursor.size}; it is cut short: fetch it again"
            )
        tensors[name] = TensorInfo(name, ne, qtype, cursor.path, data_start + offset, nbytes)
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < end:
            raise cursor.error(f"tensors '{before}' and '{tensor.name}' overlap at byte {tensor.offset}")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    return tensors

"""The GGUF header reader: the right values from good files, and a clear error from every bad one."""

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_fixtures import write_moe_gguf
from leanmoe.errors import FormatError, LeanError, UnsupportedError, UsageError
from leanmoe.formats.gguf import read_gguf
from leanmoe.formats.quant_types import BY_ID


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, ne: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


ARCH = pair("general.architecture", 8, string("llama"))


def build(
    kvs: tuple[bytes, ...] = (ARCH,),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensor_count, key_count = counts or (len(tensors), len(kvs))
    head = magic + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(kvs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "m.gguf"
        path.write_bytes(data)
        return path

    return write


def test_reads_what_the_gguf_package_reads(tmp_path: Path) -> None:
    """A model's metadata or tensor map would be wrong."""
    path = write_moe_gguf(tmp_path / "m.gguf", extras=True)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert ours.architecture == "qwen3moe"
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            assert (list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value) == (
                field.contents()
            )
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        found = (info.ne, info.qtype.id, info.offset, info.nbytes)
        assert found == (tuple(int(n) for n in t.shape), t.tensor_type, t.data_offset, t.n_bytes)
        assert info.shape == info.ne[::-1]


def test_every_value_type_and_nested_arrays(save: Callable[[bytes], Path]) -> None:
    """A key of a rarer type would be misread, or stop the model from loading."""
    numbers = [
        (0, "B", 200),
        (1, "b", -3),
        (2, "H", 60000),
        (3, "h", -300),
        (4, "I", 1 << 31),
        (5, "i", -5),
        (6, "f", 0.5),
        (7, "?", True),
        (10, "Q", 1 << 63),
        (11, "q", -(1 << 62)),
        (12, "d", 0.1),
    ]
    kvs = [pair(f"k{kind}", kind, struct.pack(f"<{fmt}", value)) for kind, fmt, value in numbers]
    for kind, fmt, value in numbers:
        kvs.append(pair(f"a{kind}", 9, struct.pack(f"<IQ2{fmt}", kind, 2, value, value)))
    inner = struct.pack("<IQ", 8, 2) + string("x") + string("ü")
    kvs.append(pair("nested", 9, struct.pack("<IQ", 9, 2) + inner + struct.pack("<IQ2B", 0, 2, 7, 8)))
    kvs.append(pair("empty", 9, struct.pack("<IQ", 8, 0)))
    model = read_gguf(save(build((ARCH, *kvs))))
    for kind, _, value in numbers:
        assert model.metadata[f"k{kind}"] == value
        assert list(model.metadata[f"a{kind}"]) == [value, value]
    assert list(model.metadata["nested"][0]) == ["x", "ü"]
    assert list(model.metadata["nested"][1]) == [7, 8]
    assert list(model.metadata["empty"]) == []
    assert b"".join(model.raw_kv.values()) == b"".join((ARCH, *kvs))
    kept = model.without_vocabulary()
    assert model.metadata.keys() - kept.metadata.keys() == {
        "nested",
        "empty",
    }  # lists of strings hold the header
    assert not kept.raw_kv
    assert kept.tensors is model.tensors


def test_string_arrays_behave_as_lists_across_read_ahead(save: Callable[[bytes], Path]) -> None:
    """A token of a large vocabulary would be lost where two reads of the header meet."""
    words = [f"word{i}" * (i % 7) for i in range(200_000)]
    body = b"".join(map(string, words))
    model = read_gguf(save(build((ARCH, pair("t", 9, struct.pack("<IQ", 8, len(words)) + body)))))
    tokens = model.metadata["t"]
    assert len(tokens) == len(words)
    assert tokens == words
    assert (tokens[-1], tokens[3:5]) == (words[-1], words[3:5])


def test_version_2_is_read(save: Callable[[bytes], Path]) -> None:
    """Files of 2023 would not load."""
    assert read_gguf(save(build(tensors=(tensor("t"),), data=16, version=2))).tensors["t"].nbytes == 16


def test_reads_no_tensor_data_of_a_huge_file(save: Callable[[bytes], Path]) -> None:
    """`lean plan` on a 242 GB model would read or map it."""
    rows = 242_000_000_000 // 16384
    path = save(build(tensors=(tensor("t", (4096, rows)),)))
    os.truncate(path, path.stat().st_size + rows * 16384)
    tracemalloc.start()
    model = read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert model.tensors["t"].nbytes == rows * 16384
    assert peak < 16 << 20


BAD = {
    "magic": (build(magic=b"GGML"), "GGUF"),
    "empty": (b"", "magic"),
    "tensor count": (build(counts=(1 << 60, 1)), "tensors"),
    "key count": (build(counts=(0, 1 << 60)), "keys"),
    "more keys than bytes": (build(counts=(0, 9)), "key"),
    "key length": (build((struct.pack("<Q", 1 << 62) + b"x" * 20,)), "key 0"),
    "key not UTF-8": (build((pair(b"\xff\xfe", 4, bytes(4)),)), "UTF-8"),
    "empty key": (build((pair("", 4, bytes(4)),)), "name"),
    "key twice": (build((ARCH, ARCH)), "twice"),
    "value type": (build((pair("k", 13, bytes(8)),)), "type 13"),
    "item type": (build((pair("k", 9, struct.pack("<IQ", 99, 1) + bytes(8)),)), "type 99"),
    "array of 2^60 numbers": (build((pair("k", 9, struct.pack("<IQ", 10, 1 << 60)),)), "items"),
    "array of 2^60 strings": (build((pair("k", 9, struct.pack("<IQ", 8, 1 << 60)),)), "items"),
    "array of 2^60 arrays": (build((pair("k", 9, struct.pack("<IQ", 9, 1 << 60)),)), "items"),
    "string length": (build((pair("k", 8, struct.pack("<Q", 1 << 63)),)), "'k'"),
    "string in an array": (build((pair("k", 9, struct.pack("<IQQ", 8, 1, (1 << 64) - 1)),)), "cut short"),
    "nesting": (build((pair("k", 9, struct.pack("<IQ", 9, 1) * 9 + bytes(99)),)), "nests"),
    "alignment 0": (build((pair("general.alignment", 4, struct.pack("<I", 0)),)), "alignment"),
    "alignment 48": (build((pair("general.alignment", 4, struct.pack("<I", 48)),)), "alignment"),
    "alignment text": (build((pair("general.alignment", 8, string("32")),)), "alignment"),
    "dimensions": (build(tensors=(tensor("t", (1,) * 5),), data=64), "dimensions"),
    "no elements": (build(tensors=(tensor("t", (4, 0)),), data=64), "dimensions"),
    "product": (build(tensors=(tensor("t", (1 << 32, 1 << 32, 1 << 32)),), data=64), "dimensions"),
    "block": (build(tensors=(tensor("t", (33,), 8),), data=64), "33"),
    "past the end": (build(tensors=(tensor("t", (64,)),), data=64), "cut short"),
    "offset": (build(tensors=(tensor("t", offset=(1 << 64) - 32),), data=64), "cut short"),
    "misaligned": (build(tensors=(tensor("t", offset=8),), data=64), "multiple of 32"),
    "overlap": (build(tensors=(tensor("a", (16,)), tensor("b", (4,), 0, 32)), data=64), "overlap"),
    "tensor twice": (build(tensors=(tensor("t"), tensor("t", offset=32)), data=64), "twice"),
    "split without number": (build((ARCH, pair("split.count", 2, struct.pack("<H", 3)))), "split.no"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_files_end_in_an_error_that_names_them(save: Callable[[bytes], Path], case: str) -> None:
    """A damaged or hostile download would crash, hang or exhaust memory."""
    data, word = BAD[case]
    path = save(data)
    tracemalloc.start()
    with pytest.raises(FormatError) as caught:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert word in str(caught.value)
    assert peak < 4 << 20


@pytest.mark.parametrize(
    "data",
    [
        build(version=1),
        build(version=4),
        build(version=3 << 24),
        build(tensors=(tensor("t", kind=31),), data=64),
    ],
    ids=["version 1", "version 4", "big-endian", "tensor type 31"],
)
def test_unsupported_files_are_refused_as_such(save: Callable[[bytes], Path], data: bytes) -> None:
    """A user would be told that a good file is broken."""
    path = save(data)
    with pytest.raises(UnsupportedError, match=str(path)):
        read_gguf(path)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """`lean info` on a pipe would hang; on a directory or nothing, end in a traceback."""
    os.mkfifo(tmp_path / "pipe.gguf")
    for name in ("pipe.gguf", "missing.gguf", ".", "a\0b.gguf"):
        with pytest.raises(UsageError):
            read_gguf(tmp_path / name)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """A download that broke off would load as a smaller model."""
    whole = write_moe_gguf(tmp_path / "m.gguf", layers=1).read_bytes()
    model = read_gguf(tmp_path / "m.gguf")
    end = max(t.offset + t.nbytes for t in model.tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in (*range(0, model.data_starts[0], 13), *range(model.data_starts[0], end, 997), end - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=r"cut\.gguf"):
            read_gguf(cut)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4)
)
def test_any_damage_ends_in_a_lean_error_or_a_readable_file(
    tmp_path: Path, edits: list[tuple[int, bytes]]
) -> None:
    """A damaged file would end in a traceback, or in tensors that lie outside the file."""
    original = tmp_path / "m.gguf"
    if not original.exists():
        write_moe_gguf(original, layers=1, extras=True)
    data = bytearray(original.read_bytes())
    for at, patch in edits:
        data[at : at + len(patch)] = patch
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    try:
        model = read_gguf(path)
        for value in model.metadata.values():
            list(value) if hasattr(value, "__len__") else value
    except LeanError:
        return
    for info in model.tensors.values():
        assert 0 <= info.offset < info.offset + info.nbytes <= len(data)


def test_split_models_are_read_through_any_shard(tmp_path: Path) -> None:
    """`lean pack` would want one particular shard, or lose the tensors of the others."""
    first = write_moe_gguf(tmp_path / "m.gguf", split_max_tensors=6)
    write_moe_gguf(tmp_path / "whole.gguf")
    shards = sorted(tmp_path.glob("m-*.gguf"))
    whole = read_gguf(tmp_path / "whole.gguf")
    for shard in shards:
        model = read_gguf(shard)
        assert (model.path, model.shards) == (first, tuple(shards))
        assert list(model.tensors) == list(whole.tensors)
        assert model.metadata["tokenizer.ggml.tokens"] == whole.metadata["tokenizer.ggml.tokens"]
        for name, info in model.tensors.items():
            read = [
                np.fromfile(t.path, np.uint8, t.nbytes, offset=t.offset) for t in (info, whole.tensors[name])
            ]
            assert np.array_equal(*read)


def test_broken_splits_name_the_shard(tmp_path: Path) -> None:
    """A missing or misplaced shard would go unnoticed."""
    write_moe_gguf(tmp_path / "m.gguf", split_max_tensors=6)
    shards = sorted(tmp_path.glob("m-*.gguf"))
    hidden = tmp_path / "hidden"
    shards[2].rename(hidden)
    with pytest.raises(FormatError, match=shards[2].name):
        read_gguf(shards[0])
    shards[2].write_bytes(shards[1].read_bytes())
    with pytest.raises(FormatError, match=shards[2].name):
        read_gguf(shards[0])
    hidden.rename(shards[2])
    other = shards[1].rename(tmp_path / "renamed.gguf")
    with pytest.raises(FormatError, match="00002-of"):
        read_gguf(other)


def test_split_totals_and_names_are_checked(tmp_path: Path) -> None:
    """Shards of two different conversions would be mixed into one model."""

    def shard(number: int, total: int, name: str) -> Path:
        kvs = (
            ARCH,
            pair("split.no", 2, struct.pack("<H", number)),
            pair("split.count", 2, struct.pack("<H", 2)),
            pair("split.tensors.count", 5, struct.pack("<i", total)),
        )
        path = tmp_path / f"m-{number + 1:05d}-of-00002.gguf"
        path.write_bytes(build(kvs, (tensor(name),), 32))
        return path

    first, second = shard(0, 2, "a"), shard(1, 2, "b")
    assert list(read_gguf(second).tensors) == ["a", "b"]
    shard(1, 2, "a")
    with pytest.raises(FormatError, match="also in"):
        read_gguf(first)
    shard(1, 2, "b")
    shard(0, 3, "a")
    with pytest.raises(FormatError, match=r"split\.tensors\.count is 3"):
        read_gguf(first)


def test_type_table_agrees_with_the_gguf_package() -> None:
    """A tensor of some type would be cut at the wrong byte."""
    for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        if int(kind) in BY_ID:
            ours = BY_ID[int(kind)]
            assert (ours.name, ours.block, ours.block_bytes) == (kind.name, block, nbytes)

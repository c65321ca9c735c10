"""A random model as files: a GGUF, the header of one, or a pack written without any GGUF beside it."""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import RawIOBase
from itertools import starmap
from math import prod
from pathlib import Path

from blake3 import blake3

from leanmoe.bench.random_model.mixtures import choose_types, file_type
from leanmoe.bench.random_model.networks import Network
from leanmoe.bench.random_model.vocabulary import tokenizer_metadata
from leanmoe.bench.random_model.weights import Weights
from leanmoe.errors import UsageError
from leanmoe.formats.gguf import GGUFFile, TensorInfo, encode_header
from leanmoe.formats.gguf_header import DEFAULT_ALIGNMENT, parse_header
from leanmoe.formats.gguf_values import Value, encode_pair
from leanmoe.pack import PackProgress, SourceFile
from leanmoe.pack.copier import ProgressCallback


@dataclass(frozen=True, slots=True)
class VirtualFile:
    """A GGUF that need not exist: `gguf` is its header as read, `header` its bytes, `nbytes` the file's length."""

    gguf: GGUFFile
    header: bytes
    nbytes: int


def virtual_file(path: Path, made: Network, mixture: str, name: str, about: str) -> VirtualFile:
    """The GGUF of `made` that would be at `path`; `name` and `about` go into its metadata."""
    types = choose_types(made, mixture)
    keys: dict[str, Value] = {
        "general.architecture": made.shape.architecture,
        "general.type": "model",
        "general.name": name,
        "general.description": about,
        "general.file_type": file_type(mixture),
        "general.quantization_version": 2,
    }
    keys |= made.keys | tokenizer_metadata(made.shape.vocab, made.shape.pre)
    infos = [(name, ne, types[name]) for name, ne in made.tensors]
    header, offsets = encode_header(list(starmap(encode_pair, keys.items())), infos, DEFAULT_ALIGNMENT)
    _, ne, qtype = infos[-1]
    nbytes = len(header) + offsets[-1] + qtype.row_bytes(ne[0]) * prod(ne[1:])
    nbytes += -nbytes % DEFAULT_ALIGNMENT
    found = parse_header(header, path, nbytes)
    gguf = GGUFFile(path, (path,), (found.data_start,), found.metadata, found.tensors, found.raw_kv)
    return VirtualFile(gguf, header, nbytes)


def write_gguf(file: VirtualFile, weights: Weights | None, progress: ProgressCallback | None = None) -> None:
    """Writes `file`. Without `weights` it has its length but is sparse: its data takes no room and reads as zeros.

    Raises `OSError`.
    """
    tensors = file.gguf.tensors.values()
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    with file.gguf.path.open("xb", buffering=0) as out:
        _write(out, memoryview(file.header))
        out.truncate(file.nbytes)
        if weights is None:
            return
        for tensor in tensors:
            out.seek(tensor.offset)
            for index in range(-(-tensor.nbytes // weights.unit_bytes(tensor))):
                _write(out, weights.unit(tensor, index).data)
            done += tensor.nbytes
            if progress is not None:
                progress(PackProgress(done, total, tensor.name))


def _write(out: RawIOBase, data: memoryview) -> None:
    while data:
        data = data[out.write(data) :]


class RandomSource:
    """A `pack.Source` of a file that does not exist."""

    arriving = False

    def __init__(self, file: VirtualFile, weights: Weights) -> None:
        self.gguf, self._file, self._weights = file.gguf, file, weights

    @property
    def files(self) -> tuple[Path, ...]:
        """None: the header says everything, the seed too."""
        return ()

    def describe(self) -> tuple[SourceFile, ...]:
        """The file that does not exist."""
        digest = blake3(self._file.header).hexdigest()
        return (SourceFile(self.gguf.path.name, self._file.nbytes, digest),)

    def check_consumable(self) -> None:
        """Raises `UsageError`: nothing can be freed."""
        raise UsageError(f"{self.gguf.path}: a random model has no bytes on disk to consume")

    @contextmanager
    def open(self, consumer: int | None) -> Iterator["_Reader"]:
        """Nothing is opened."""
        yield _Reader(self.gguf, self._weights)


class _Reader:
    """Reads from a file that was never written. Keeps the unit made last: reads follow each other."""

    def __init__(self, model: GGUFFile, weights: Weights) -> None:
        self._weights = weights
        self._tensors = sorted(model.tensors.values(), key=lambda tensor: tensor.offset)
        self._starts = [tensor.offset for tensor in self._tensors]
        self._last: tuple[str, int, memoryview] = ("", -1, memoryview(b""))

    def read(self, path: Path, offset: int, buffer: memoryview) -> None:
        tensor = self._tensors[bisect_right(self._starts, offset) - 1]
        at, got = offset - tensor.offset, 0
        while got < len(buffer):
            index, inside = divmod(at + got, self._weights.unit_bytes(tensor))
            part = self._unit(tensor, index)[inside : inside + len(buffer) - got]
            buffer[got : got + len(part)] = part
            got += len(part)

    def _unit(self, tensor: TensorInfo, index: int) -> memoryview:
        if self._last[:2] != (tensor.name, index):
            self._last = (tensor.name, index, memoryview(self._weights.unit(tensor, index).data))
        return self._last[2]

    def done(self, path: Path, offset: int, nbytes: int) -> None:
        pass

    def free(self, path: Path, offset: int, nbytes: int) -> None:
        pass

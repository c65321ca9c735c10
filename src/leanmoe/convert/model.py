"""A checkpoint seen as the GGUF that it would be converted to, whose bytes are computed as they are read."""

import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from leanmoe.convert.block import Block, Named
from leanmoe.convert.checkpoint import Checkpoint
from leanmoe.convert.config import Config
from leanmoe.convert.conversion import Conversion, find_conversion
from leanmoe.convert.encode import encode
from leanmoe.convert.mixture import Shape, find_recipe, storage_types
from leanmoe.convert.tensors import F32Array, Tensor, U8Array
from leanmoe.convert.tokenizer import tokenizer_metadata
from leanmoe.errors import FormatError, LeanError, UnsupportedError, UsageError
from leanmoe.formats.gguf import GGUFFile, encode_header
from leanmoe.formats.gguf_header import parse_header
from leanmoe.formats.gguf_values import Value, encode_pair
from leanmoe.formats.quant_types import QuantType
from leanmoe.formats.safetensors import read_checkpoint
from leanmoe.pack.manifest import SourceFile
from leanmoe.pack.source import Reader, describe_file

_log = logging.getLogger(__name__)
_ALIGNMENT = 4096
# Floats in memory at a time while a tensor is encoded.
_FLOATS = 4 << 20
# Files beside the tensors that the result depends on.
SETTINGS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor and the type that it gets."""

    name: str
    tensor: Tensor
    qtype: QuantType

    @property
    def row_bytes(self) -> int:
        return (
            self.qtype.row_bytes(self.tensor.shape[-1]) if not self.tensor.encoded else self.tensor.shape[-1]
        )


class CheckpointSource:
    """A `pack.Source`: `gguf` describes a file that does not exist, named after the checkpoint's folder."""

    def __init__(
        self,
        folder: Path,
        quant: str | None = None,
        *,
        name: str | None = None,
        arrive: Callable[[Path], None] | None = None,
    ) -> None:
        """Reads headers and settings, no tensor. `name` is the model's, else the folder's; `arrive` waits for a file
        whose header alone is there yet.

        Raises `UsageError` if `folder` holds no checkpoint, `UnsupportedError` for a model that cannot be
        converted, and `FormatError` for one that is damaged, or has tensors that its conversion does not know.
        """
        self._folder = folder
        self._name = name or folder.resolve().name
        self._arrive = arrive
        self._recipe = find_recipe(quant)
        with _naming(folder):
            self._config = Config.read(folder)
            self._conversion = find_conversion(self._config)
            self._fp8_block = _fp8_block(self._config)
            self._metadata = self._conversion.metadata(self._config)
            self._stored = read_checkpoint(folder)
            checkpoint = Checkpoint(self._stored, self._fp8_block)
            try:
                parts = self._parts(checkpoint)
            finally:
                checkpoint.close()
            self.gguf = self._virtual_file(parts)

    @property
    def arriving(self) -> bool:
        """Whether files are waited for as they are read."""
        return self._arrive is not None

    @property
    def files(self) -> tuple[Path, ...]:
        """The checkpoint's files, tensors first."""
        settings = (self._folder / name for name in SETTINGS)
        return (*self._stored.files, *(path for path in settings if path.exists()))

    def describe(self) -> tuple[SourceFile, ...]:
        """Each tensor file with the digest of its header, each file of settings with that of all of it."""
        heads = self._stored.files
        return tuple(describe_file(path, heads.get(path, -1)) for path in self.files)

    def check_consumable(self) -> None:
        """Raises `UsageError`: a checkpoint is not freed piece by piece."""
        raise UsageError(f"{self._folder}: --consume works for GGUF files; this is a safetensors checkpoint")

    @contextmanager
    def open(self, consumer: int | None) -> Iterator[Reader]:
        """Opens the checkpoint's files."""
        checkpoint = Checkpoint(self._stored, self._fp8_block, self._arrive)
        try:
            parts = self._parts(checkpoint)
            yield _Encoder({self.gguf.tensors[name].offset: part for name, part in parts.items()})
        finally:
            checkpoint.close()

    def _parts(self, checkpoint: Checkpoint) -> dict[str, _Part]:
        tensors: dict[str, Tensor] = {}
        for name, tensor in _tensors(checkpoint, self._config, self._conversion):
            if name in tensors:
                raise FormatError(f"{self._folder}: two tensors of the checkpoint become '{name}'")
            tensors[name] = tensor
        left = [n for n in checkpoint.left() if not any(re.fullmatch(p, n) for p in self._conversion.ignored)]
        if left:
            raise FormatError(
                f"{self._folder}: tensor '{left[0]}' (and {len(left) - 1} more) is not known of a "
                f"{self._config.model_type} model"
            )
        shapes = {name: Shape(t.shape, t.qtype, t.encoded) for name, t in tensors.items()}
        experts = self._metadata.get("expert_count", 0)
        types = storage_types(
            self._recipe,
            shapes,
            self._config.layers,
            experts if isinstance(experts, int) else 0,
        )
        return {name: _Part(name, tensor, types[name]) for name, tensor in tensors.items()}

    def _virtual_file(self, parts: Mapping[str, _Part]) -> GGUFFile:
        keys = self._keys()
        self._check_vocabulary(keys["tokenizer.ggml.tokens"], parts)
        pairs = [encode_pair(key, value) for key, value in keys.items()]
        infos = [(name, _ne(part), part.qtype) for name, part in parts.items()]
        header, offsets = encode_header(pairs, infos, _ALIGNMENT)
        size = len(header) + offsets[-1] + parts[infos[-1][0]].tensor.rows * parts[infos[-1][0]].row_bytes
        path = self._folder / f"{self._name}.gguf"
        parsed = parse_header(header, path, size)
        return GGUFFile(path, (path,), (parsed.data_start,), parsed.metadata, parsed.tensors, parsed.raw_kv)

    def _check_vocabulary(self, tokens: Value, parts: Mapping[str, _Part]) -> None:
        embedding = parts.get("token_embd.weight")
        assert isinstance(tokens, list)
        if embedding is None or embedding.tensor.shape[0] != len(tokens):
            there = embedding.tensor.shape[0] if embedding is not None else "no"
            raise FormatError(
                f"{self._config.source}: with its vocab_size the tokenizer has {len(tokens)} tokens, "
                f"but the checkpoint has embeddings of {there}"
            )

    def _keys(self) -> dict[str, Value]:
        arch = self._conversion.architecture
        keys: dict[str, Value] = {
            "general.architecture": arch,
            "general.type": "model",
            "general.name": self._name,
            "general.alignment": _ALIGNMENT,
        }
        if self._recipe is not None:
            keys["general.file_type"] = self._recipe.file_type
        keys |= {f"{arch}.{key}": value for key, value in self._metadata.items()}
        keys |= tokenizer_metadata(self._folder, self._config, self._conversion.pre)
        return keys | {"general.quantization_version": 2}


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Puts the folder before the message of an error that names none of its files."""
    try:
        yield
    except LeanError as error:
        if str(folder) in str(error):
            raise
        raise type(error)(f"{folder}: {error}") from error


def _fp8_block(config: Config) -> tuple[int, int]:
    """The rows and columns that share a scale. Raises `UnsupportedError` for a quantised checkpoint of another kind."""
    settings = config.section("quantization_config")
    method = settings.text("quant_method", "fp8")
    if method not in ("fp8", "mxfp4", "compressed-tensors"):
        raise UnsupportedError(
            f"{config.source}: the checkpoint is quantised by '{method[:80]}'; one in BF16, F16, F32, FP8 or MXFP4 "
            "was wanted"
        )
    block = settings.values.get("weight_block_size") or [128, 128]
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise config.error(f"weight_block_size is {str(block)[:80]}; two sizes were wanted")
    return block[0], block[1]


def _ne(part: _Part) -> tuple[int, ...]:
    *lead, last = part.tensor.shape
    if part.tensor.encoded:
        last = last // part.qtype.block_bytes * part.qtype.block
    return (last, *reversed(lead))


def _tensors(checkpoint: Checkpoint, config: Config, conversion: Conversion) -> Iterator[Named]:
    """All tensors with their names in the GGUF: the top, then block by block. Blocks beyond the layers are left out."""
    layers = config.layers
    layer_of = re.compile(r"((?:.*\.)?)layers\.(\d+)\..*")
    prefixes: dict[int, str] = {}
    for name in checkpoint.names():
        match = layer_of.fullmatch(name)
        if match is None or any(re.fullmatch(pattern, name) for pattern in conversion.ignored):
            continue
        number = int(match[2])
        if number >= layers:
            checkpoint.ignore(name)  # blocks for multi-token prediction
        else:
            prefixes[number] = match[1]
    if sorted(prefixes) != list(range(layers)):
        raise FormatError(
            f"{config.source}: num_hidden_layers is {layers}, but the tensors are of {len(prefixes)} layers"
        )
    for name, tensor in conversion.top(Block(checkpoint, config, prefixes[0], -1)):
        yield name, tensor
    for number in range(layers):
        block = Block(checkpoint, config, f"{prefixes[number]}layers.{number}.", number)
        for name, tensor in conversion.block(block):
            yield f"blk.{number}.{name}", tensor


class _Encoder:
    """A `pack.Reader` of the virtual file: the tensors at these offsets, encoded as they are read."""

    def __init__(self, parts: Mapping[int, _Part]) -> None:
        self._starts = sorted(parts)
        self._parts = parts

    def read(self, path: Path, offset: int, buffer: memoryview) -> None:
        """Encodes the rows that hold these bytes, which are of one tensor."""
        start = self._starts[bisect_right(self._starts, offset) - 1]
        part = self._parts[start]
        row_bytes = part.row_bytes
        done, first = 0, offset - start
        step = max(1, _FLOATS // part.tensor.shape[-1])
        while done < len(buffer):
            row, skip = divmod(first + done, row_bytes)
            rows = min(step, -(-(skip + len(buffer) - done) // row_bytes))
            values = part.tensor.read(row, row + rows)
            data = values if part.tensor.encoded else self._encode(values, part)
            piece = data.data.cast("B")[skip:][: len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    @staticmethod
    def _encode(values: F32Array, part: _Part) -> U8Array:
        try:
            return encode(values, part.qtype)
        except ValueError as error:
            raise FormatError(f"the checkpoint's tensor for '{part.name}': {error}") from None

    def done(self, path: Path, offset: int, nbytes: int) -> None:
        """Nothing: the checkpoint drops what it has read."""

    def free(self, path: Path, offset: int, nbytes: int) -> None:
        raise AssertionError("a checkpoint is never freed: `check_consumable` refuses it")

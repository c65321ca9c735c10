"""Which bytes of a GGUF model belong to which expert, and which tensors are the trunk.

Expert tensors are known by their names, `blk.N.ffn_{gate,up,down,gate_up}_exps.{weight,bias,scale}`, never by
their number of dimensions. The expert index is the slowest dimension, so an expert is one contiguous range of
each tensor (two of a fused one's bytes: gate rows, then up rows).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.formats.gguf import GGUFFile, TensorInfo
from leanmoe.pack.layout import ExpertLayout, Section
from leanmoe.pack.manifest import (
    FILE_ALIGNMENT,
    MAX_EXPERT_FILES,
    MAX_LAYERS,
    SECTION_ALIGNMENT,
    SECTION_NAMES,
    WEIGHTS,
    expected_shapes,
)

_EXPERT = re.compile(r"blk\.(0|[1-9]\d{0,3})\.ffn_(gate_up|gate|up|down)_exps\.(\w+)")
_LEGACY = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.(weight|bias|scale)")
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_KINDS = {"weight": "", "bias": "_bias", "scale": "_scale"}


@dataclass(frozen=True, slots=True)
class Slice:
    """Expert `e` has `nbytes` bytes of `tensor`, at byte `first + e * stride` of its data."""

    tensor: TensorInfo
    shape: tuple[int, ...]
    first: int
    stride: int
    nbytes: int

    def offset(self, expert: int) -> int:
        """The byte offset of `expert`'s part in the tensor's file."""
        return self.tensor.offset + self.first + expert * self.stride


@dataclass(frozen=True, slots=True)
class LayerSlices:
    """Where the experts of one layer lie in the source, and how each expert's file is laid out."""

    layer: int
    slices: Mapping[str, Slice]
    layout: ExpertLayout


@dataclass(frozen=True, slots=True)
class Split:
    """A model taken apart: experts by layer, the trunk's tensors, and those that are left out."""

    expert_count: int
    expert_used_count: int
    layers: tuple[LayerSlices, ...]
    trunk: tuple[TensorInfo, ...]
    skipped: tuple[TensorInfo, ...]


def is_expert_tensor(name: str) -> bool:
    """Whether a tensor of this name holds the routed experts of a layer, one after the other."""
    return _EXPERT.fullmatch(name) is not None


def split_experts(gguf: GGUFFile) -> Split:
    """Takes `gguf` apart into experts, trunk and the blocks for multi-token prediction, which are skipped.

    Raises `FormatError` if expert tensors are missing or disagree with each other or with the metadata, and
    `UnsupportedError` for one tensor per expert (Mixtral files of before 2024).
    """
    blocks, main_layers = _block_counts(gguf)
    by_layer: dict[int, dict[str, TensorInfo]] = {}
    trunk, skipped = [], []
    for tensor in gguf.tensors.values():
        block = _BLOCK.match(tensor.name)
        if block and int(block[1]) >= blocks:
            raise FormatError(
                f"{tensor.path}: tensor '{tensor.name}' is of block {block[1]}; the metadata names {blocks} blocks"
            )
        if block and int(block[1]) >= main_layers:
            skipped.append(tensor)
        elif match := _EXPERT.fullmatch(tensor.name):
            if match[3] not in _KINDS:
                raise UnsupportedError(
                    f"{tensor.path}: tensor '{tensor.name}': an expert's '{match[3]}' is unknown"
                )
            by_layer.setdefault(int(match[1]), {})[match[2] + _KINDS[match[3]]] = tensor
        elif _LEGACY.fullmatch(tensor.name):
            raise UnsupportedError(
                f"{tensor.path}: tensor '{tensor.name}': one tensor per expert is the layout of before 2024; "
                "convert the model to GGUF again with a current llama.cpp"
            )
        else:
            trunk.append(tensor)
    _check_skipped(gguf, skipped)
    arch = gguf.architecture
    expert_count = gguf.integer(f"{arch}.expert_count", 0)
    if expert_count < 0 or bool(by_layer) != bool(expert_count):
        raise FormatError(
            f"{gguf.path}: {arch}.expert_count is {expert_count}, "
            f"but {len(by_layer)} layers have expert tensors"
        )
    if len(by_layer) * expert_count > MAX_EXPERT_FILES or max(by_layer, default=0) >= MAX_LAYERS:
        raise FormatError(
            f"{gguf.path}: {len(by_layer)} layers of {expert_count} experts; "
            f"at most {MAX_LAYERS} layers and {MAX_EXPERT_FILES} experts are allowed"
        )
    used = gguf.integer(f"{arch}.expert_used_count") if by_layer else 0
    if by_layer and not 1 <= used <= expert_count:
        raise FormatError(f"{gguf.path}: {arch}.expert_used_count is {used}; 1 to {expert_count} were wanted")
    layers = tuple(_layer_slices(gguf, layer, by_layer[layer], expert_count) for layer in sorted(by_layer))
    return Split(expert_count, used, layers, tuple(trunk), tuple(skipped))


def _block_counts(gguf: GGUFFile) -> tuple[int, int]:
    """How many blocks there are, and how many are decoder layers: those after them serve multi-token prediction."""
    arch = gguf.architecture
    blocks = gguf.integer(f"{arch}.block_count")
    prediction = gguf.integer(f"{arch}.nextn_predict_layers", 0)
    if blocks < 1 or not 0 <= prediction < blocks:
        raise FormatError(
            f"{gguf.path}: {arch}.block_count is {blocks} and {arch}.nextn_predict_layers {prediction}; "
            "at least one layer must remain"
        )
    return blocks, blocks - prediction


def _check_skipped(gguf: GGUFFile, skipped: list[TensorInfo]) -> None:
    """A block that is left out must be one for multi-token prediction, or the model would lose a layer unseen."""
    prefixes = {tensor.name[: tensor.name.index(".", 4) + 1] for tensor in skipped}
    for prefix in sorted(prefixes):
        if not any(tensor.name.startswith(prefix + "nextn.") for tensor in skipped):
            raise FormatError(
                f"{gguf.path}: {gguf.architecture}.nextn_predict_layers says that {prefix[:-1]} serves "
                f"multi-token prediction, but it has no '{prefix}nextn.*' tensor"
            )


def _layer_slices(gguf: GGUFFile, layer: int, tensors: Mapping[str, TensorInfo], experts: int) -> LayerSlices:
    slices: dict[str, Slice] = {}
    for name, tensor in tensors.items():
        fused = name.startswith("gate_up")
        pieces = [_slice(tensor, experts, name, half) for half in ((0, 1) if fused else (None,))]
        names = [name.replace("gate_up", part) for part in ("gate", "up")] if fused else [name]
        for part, piece in zip(names, pieces, strict=True):
            if part in slices:
                raise FormatError(
                    f"{tensor.path}: layer {layer} has both '{tensor.name}' and a separate {part}"
                )
            slices[part] = piece
    missing = [name for name in WEIGHTS if name not in slices]
    if missing:
        raise FormatError(f"{gguf.path}: layer {layer} has no 'blk.{layer}.ffn_{missing[0]}_exps.weight'")
    wanted = expected_shapes(slices["gate"].shape)
    for name, piece in slices.items():
        if piece.shape != wanted[name]:
            raise FormatError(
                f"{piece.tensor.path}: tensor '{piece.tensor.name}' gives each expert the shape "
                f"{list(piece.shape)}; beside a gate of {list(slices['gate'].shape)}, "
                f"{list(wanted[name])} was wanted"
            )
    ordered = {name: slices[name] for name in SECTION_NAMES if name in slices}
    return LayerSlices(layer, ordered, _layout(ordered))


def _slice(tensor: TensorInfo, experts: int, name: str, half: int | None) -> Slice:
    """One expert's part of `tensor`: all its rows, or of a fused tensor the first (0) or second (1) half."""
    dims = 1 if name.endswith("_scale") else 2 if name.endswith("_bias") else 3
    ne = tensor.ne + (1,) * (dims - len(tensor.ne))
    while len(ne) > dims and ne[-1] == 1:
        ne = ne[:-1]
    if len(ne) != dims or ne[-1] != experts:
        raise FormatError(
            f"{tensor.path}: tensor '{tensor.name}' has dimensions {list(tensor.ne)}; {dims} were wanted, "
            f"the last {experts} (one for each expert)"
        )
    shape = ne[-2::-1] or (1,)
    stride = tensor.nbytes // experts
    if dims == 1:
        half = None  # one factor for the product as a whole: it holds for both halves
    if half is None:
        return Slice(tensor, shape, 0, stride, stride)
    if shape[0] % 2:
        raise FormatError(
            f"{tensor.path}: tensor '{tensor.name}' has {shape[0]} rows; gate and up need an even number"
        )
    rows = shape[0] // 2
    nbytes = tensor.qtype.row_bytes(rows) if dims == 2 else stride // 2
    return Slice(tensor, (rows, *shape[1:]), half * nbytes, stride, nbytes)


def _layout(slices: Mapping[str, Slice]) -> ExpertLayout:
    sections, end = {}, 0
    for name, piece in slices.items():
        offset = -(-end // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        sections[name] = Section(piece.tensor.qtype, piece.shape, offset, piece.nbytes)
        end = offset + piece.nbytes
    return ExpertLayout(sections, -(-end // FILE_ALIGNMENT) * FILE_ALIGNMENT)

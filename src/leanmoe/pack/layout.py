"""Where the parts of one expert lie inside its file. Shared by the pack format and the kernels."""

from collections.abc import Mapping
from dataclasses import dataclass

from leanmoe.formats.quant_types import QuantType

CANONICAL = "canonical"
"""The layout of a section whose bytes are in the order of the GGUF."""


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor of an expert: `nbytes` bytes at byte `offset` of the expert's file.

    `shape` is in torch order: (F, D) for gate and up, (D, F) for down, (F,) or (D,) for a bias, () or (1,)
    for a scale. `layout` names a rearrangement of the bytes for the processor's products; in files it is always
    "canonical", the order of the GGUF.
    """

    qtype: QuantType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    layout: str = CANONICAL


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The sections of every expert of one layer, and the size of its file.

    `sections` has the keys gate, up, down, and where the model has them gate_bias, up_bias, down_bias,
    gate_scale, up_scale, down_scale. `file_bytes` is a multiple of 4096.
    """

    sections: Mapping[str, Section]
    file_bytes: int

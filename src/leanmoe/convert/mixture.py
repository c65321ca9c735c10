"""Which type each tensor gets: the mixtures that llama.cpp's names such as Q4_K_M stand for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from leanmoe.errors import UsageError
from leanmoe.formats.quant_types import BY_NAME, QuantType

# Name -> general.file_type, the base type. None keeps the checkpoint's own floats.
_NAMES: Mapping[str, tuple[int, str]] = {
    "f32": (0, "F32"),
    "f16": (1, "F16"),
    "bf16": (32, "BF16"),
}
QUANTS = tuple(_NAMES)
_ALWAYS_F32 = re.compile(
    r".*_norm\.weight|.*ffn_gate_inp(_shexp)?\.weight|.*ssm_conv1d\.weight|.*indexer\.proj\.weight"
)


@dataclass(frozen=True, slots=True)
class Mixture:
    """How the tensors of one model are stored. `base` is None to keep the checkpoint's own float types."""

    name: str
    file_type: int | None
    base: str | None

    def storage(self, name: str, shape: tuple[int, ...], found: QuantType) -> QuantType:
        """The type for tensor `name` of torch `shape` whose values are of type `found` in the checkpoint."""
        if len(shape) < 2 or not name.endswith(".weight") or _ALWAYS_F32.fullmatch(name):
            return BY_NAME["F32"]
        return found if self.base is None else BY_NAME[self.base]


def mixture(name: str | None) -> Mixture:
    """The mixture called `name` (in any case), None for the checkpoint's own types. Raises `UsageError`."""
    if name is None:
        return Mixture("as stored", None, None)
    if name.lower() not in _NAMES:
        raise UsageError(f"'{name}' is no quantisation that lean writes; known: {', '.join(QUANTS)}")
    file_type, base = _NAMES[name.lower()]
    return Mixture(name.lower(), file_type, base)

"""What an architecture's conversion is made of: taking the tensors of one block, or of the model's top, by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from leanmoe.convert.checkpoint import Checkpoint
from leanmoe.convert.config import Config
from leanmoe.convert.tensors import Tensor, stacked
from leanmoe.errors import FormatError

# The name of a tensor in the GGUF (within its block, with its suffix) and the tensor.
Named = tuple[str, Tensor]
_PARTS = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Block:
    """Tensors whose names start with `prefix`, such as `model.layers.3.`. `layer` is the block's number."""

    checkpoint: Checkpoint
    config: Config
    prefix: str
    layer: int

    def has(self, name: str) -> bool:
        """Whether the checkpoint has `prefix + name`."""
        return self.prefix + name in self.checkpoint

    def take(self, name: str) -> Tensor:
        """The tensor `prefix + name`, as floats. Raises `FormatError` if it is missing."""
        return self.checkpoint.take(self.prefix + name)

    def renamed(self, names: Mapping[str, str]) -> Iterator[Named]:
        """Those of `names` (checkpoint -> GGUF, both without suffix) that are there, weights and biases."""
        for theirs, ours in names.items():
            for suffix in ("weight", "bias"):
                if self.has(f"{theirs}.{suffix}"):
                    yield f"{ours}.{suffix}", self.take(f"{theirs}.{suffix}")

    def experts(
        self, prefix: str, count: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> Iterator[Named]:
        """The routed experts under `prefix` (`mlp.experts`), stacked, whether the checkpoint holds each expert's
        gate, up and down by itself (`names`), or all experts' in `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F].
        """
        fused = f"{prefix}.gate_up_proj"
        if self.has(fused):
            both = self.take(fused)
            width = both.shape[1] // 2
            yield "ffn_gate_exps.weight", both.reindexed(lambda rows: rows[:, :width])
            yield "ffn_up_exps.weight", both.reindexed(lambda rows: rows[:, width:])
            yield "ffn_down_exps.weight", self.take(f"{prefix}.down_proj")
            return
        for part, name in zip(_PARTS, names, strict=True):
            parts = [self.take(f"{prefix}.{expert}.{name}.weight") for expert in range(count)]
            if any(tensor.shape != parts[0].shape for tensor in parts):
                raise FormatError(f"{self.config.source}: the experts of layer {self.layer} differ in shape")
            yield f"ffn_{part}_exps.weight", stacked(parts)


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Rows (or a bias) of q or k, re-ordered in each head from half-split rope pairs (i, i + D/2) to neighbours.

    Source: the GGUF of `llama` and its kin, whose rope pairs dimensions 2i and 2i + 1.
    """
    if not heads or tensor.shape[0] % (2 * heads):
        raise FormatError(f"{tensor.shape[0]} rows do not make {heads} heads of an even size")
    return tensor.reindexed(lambda rows: rows.reshape(heads, 2, -1).transpose(0, 2, 1).reshape(-1))

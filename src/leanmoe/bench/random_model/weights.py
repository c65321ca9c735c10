"""The bytes of every tensor of a random model, each part computed by itself: the same for the same seed.

Matrices are random blocks with the standard deviation that keeps the network well-conditioned: whatever is normed
before a product has mean square 1 after it, and all sublayers together add as much to the residual stream as the
embedding put there. With locality each adds what makes the next layer's picks as hard to foresee as in real models.
"""

import math
import zlib
from collections.abc import Mapping

import numpy as np

from leanmoe.bench.random_model.blocks import F32, U8, random_rows
from leanmoe.bench.random_model.locality import ADDED, Walk
from leanmoe.bench.random_model.networks import Network
from leanmoe.convert.encode import encode
from leanmoe.formats.gguf import TensorInfo

_UNIT_BYTES = 1 << 20
# With locality: the root mean square of what a sublayer adds to the embedding's 1, up to `ADDED` in all.
_SUBLAYER = 0.12
_SWIGLU_RMS = 0.6  # of what the last product of an FFN reads
_ROUTER_STD = 1.2
_OUTPUT_STD = 2.0


class Weights:
    """Fills the tensors of `made`. A unit of a tensor is one matrix of a stack, or some rows of a matrix."""

    def __init__(self, made: Network, seed: int, *, locality: bool) -> None:
        self._made, self._seed = made, seed
        added = min(ADDED, 2 * made.blocks * _SUBLAYER**2) if locality else 1.0
        self._sublayer = math.sqrt(added / (2 * made.blocks))
        self.walk = Walk(made.shape, self._random("walk", 0), added) if locality else None

    @staticmethod
    def unit_bytes(tensor: TensorInfo) -> int:
        """The bytes of each of a tensor's units, but for the last, which may be shorter."""
        row = tensor.qtype.row_bytes(tensor.ne[0])
        if len(tensor.ne) > 2:
            return row * tensor.ne[1]
        return row * max(1, _UNIT_BYTES // row)

    def unit(self, tensor: TensorInfo, index: int) -> U8:
        """The bytes of the unit `index`, flat."""
        columns = tensor.ne[0]
        row, size = tensor.qtype.row_bytes(columns), self.unit_bytes(tensor)
        rows = min(size, tensor.nbytes - index * size) // row
        rng = self._random(tensor.name, index)
        if self.walk is not None and tensor.name in ("token_embd.weight", "output.weight"):
            tokens = np.arange(rows) + index * (size // row)
            given = self.walk.embeddings if tensor.name == "token_embd.weight" else self.walk.outputs
            return encode(given(tokens), tensor.qtype).reshape(-1)
        values = self._vector(tensor.name, rng, rows, columns)
        if values is not None:
            return encode(values, tensor.qtype).reshape(-1)
        return random_rows(rng, tensor.qtype, rows, columns, self._std(tensor)).reshape(-1)

    def _random(self, name: str, index: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64([self._seed, zlib.crc32(name.encode()), index]))

    def _vector(self, name: str, rng: np.random.Generator, rows: int, columns: int) -> F32 | None:
        """Norms, biases and such; None for a matrix."""
        shape = (rows, columns)
        if name.endswith(("norm.weight", "nextn.enorm.weight", "nextn.hnorm.weight")):
            return np.ones(shape, np.float32)
        gain = next((gain for end, gain in _VECTORS.items() if name.endswith(end)), None)
        if gain is None:
            return None
        noise = rng.standard_normal(shape, dtype=np.float32) * np.float32(gain)
        return -np.exp(noise) if name.endswith("ssm_a") else noise

    def _std(self, tensor: TensorInfo) -> float:
        name, shape = tensor.name, self._made.shape
        if name == "token_embd.weight":
            return 1.0
        fan_in = (
            tensor.ne[1] if name.endswith("attn_k_b.weight") else tensor.ne[0]
        )  # used the other way round
        gain = 1.0
        if name == "output.weight":
            gain = _OUTPUT_STD
        elif name.endswith("ffn_gate_inp.weight"):
            gain = _ROUTER_STD
        elif name.endswith(("attn_output.weight", "ssm_out.weight")):
            gain = self._sublayer
        elif ".ffn_down" in name:
            gain = self._sublayer / _SWIGLU_RMS
            if "_exps" in name:  # k outputs with weights near 1/k
                gain *= math.sqrt(0.85 * shape.top_k) / _number(shape.keys, "expert_weights_scale", 1.0)
        return gain / math.sqrt(fan_in)


_VECTORS = {  # standard deviations; of ssm_a, the decay of each value head's state, that of its logarithm
    "ssm_a": 1.0,
    "ssm_dt.bias": 0.5,
    "ssm_conv1d.weight": 0.5,
    "attn_sinks.weight": 1.0,
    "attn_output.bias": 0.0,
    ".bias": 0.02,
}


def _number(keys: Mapping[str, object], key: str, default: float) -> float:
    value = keys.get(key, default)
    assert isinstance(value, int | float)
    return value

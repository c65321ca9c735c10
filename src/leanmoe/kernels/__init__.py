"""Products straight from quantised blocks: in C++ for tensors on the CPU, in torch for those elsewhere.

All tensors are contiguous, activations and results float32. A call that does not fit raises `ValueError`.
"""

import torch

from leanmoe.formats.quant_types import QuantType
from leanmoe.kernels import cpu, torch_reference
from leanmoe.kernels.cpu import (
    available_isas,
    compiled_isas,
    get_num_threads,
    isa,
    quantize,
    quantized_types,
    release_scratch,
    scratch_bytes,
    set_isa,
    set_num_threads,
)
from leanmoe.kernels.types import ExpertBatch, Weight
from leanmoe.pack.layout import ExpertLayout

__all__ = [
    "ExpertBatch",
    "Weight",
    "available_isas",
    "compiled_isas",
    "dequantize",
    "embed",
    "get_num_threads",
    "isa",
    "linear",
    "moe_ffn",
    "quantize",
    "quantized_types",
    "release_scratch",
    "scratch_bytes",
    "set_isa",
    "set_num_threads",
]


def linear(w: Weight, x: torch.Tensor) -> torch.Tensor:
    """x @ w.T: float32 [T, rows] for x float32 [T, cols]."""
    return cpu.linear(w, x) if w.data.device.type == "cpu" else torch_reference.linear(w, x)


def embed(w: Weight, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` (int64 [T]) of the table `w`, dequantised: float32 [T, cols]."""
    return cpu.embed(w, ids) if w.data.device.type == "cpu" else torch_reference.embed(w, ids)


def dequantize(data: torch.Tensor, qtype: QuantType, shape: tuple[int, ...]) -> torch.Tensor:
    """The exact values of the blocks in `data` (uint8, 1-D) as float32 of `shape`."""
    if data.device.type == "cpu":
        return cpu.dequantize(data, qtype, shape)
    return torch_reference.dequantize(data, qtype, shape)


def moe_ffn(
    layout: ExpertLayout, batch: ExpertBatch, x: torch.Tensor, out: torch.Tensor, activation: str = "silu"
) -> None:
    """out[dest[i]] = down(act(gate x[token[i]]) * up x[token[i]]) for each pair i of the batch.

    `activation` is "silu", "gelu" (tanh form) or "swiglu_oai" (clamped; gpt-oss). x is [T, D], out [R, D].
    On the CPU the bits of out[dest[i]] depend only on the expert's bytes and on x[token[i]].
    """
    run = cpu.moe_ffn if x.device.type == "cpu" else torch_reference.moe_ffn
    run(layout, batch, x, out, activation)

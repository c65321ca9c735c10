"""The same products in plain torch, on any device: exact dequantisation, then float32 matrix products.

The reference for other kernels, and what a GPU computes with. Activations are not rounded here.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from leanmoe.errors import UnsupportedError
from leanmoe.formats.quant_types import QuantType
from leanmoe.kernels.checks import (
    check_batch,
    check_canonical,
    check_embed,
    check_indices,
    check_layout,
    check_linear,
    check_linear_each,
    check_range,
)
from leanmoe.kernels.torch_blocks import BLOCKS
from leanmoe.kernels.types import Activation, ExpertBatch, Weight, activation, check_bytes
from leanmoe.pack.layout import CANONICAL, ExpertLayout


def dequantize(data: Tensor, qtype: QuantType, shape: tuple[int, ...]) -> Tensor:
    """The exact values of `data` as float32 of `shape`. `UnsupportedError` for a type without code here."""
    check_bytes("data", data, qtype, int(torch.Size(shape[:-1]).numel()), shape[-1] if shape else 1)
    return _values(data, qtype).view(shape)


def _values(data: Tensor, qtype: QuantType) -> Tensor:
    unpack = BLOCKS.get(qtype.name)
    if unpack is None:
        raise UnsupportedError(
            f"{qtype.name} weights cannot be computed on {data.device}; "
            f"use the CPU, or one of {', '.join(BLOCKS)}"
        )
    if data.storage_offset() % 8:  # views of a wider type need an aligned start
        data = data.clone()
    return unpack(data.view(-1, qtype.block_bytes))


def linear(w: Weight, x: Tensor) -> Tensor:
    """x @ w.T: float32 [T, rows] for x float32 [T, cols]. Raises `ValueError` where they do not fit."""
    check_linear(w, x)
    check_canonical(w)
    return x @ _values(w.data, w.qtype).view(w.shape).T


def linear_each(w: Weight, x: Tensor) -> Tensor:
    """Run i of the rows of w times part i of each token: [T, count, rows] for x [T, count, cols]."""
    rows = check_linear_each(w, x)
    check_canonical(w)
    values = _values(w.data, w.qtype).view(x.shape[1], rows, x.shape[2])
    return (x.transpose(0, 1) @ values.transpose(1, 2)).transpose(0, 1).contiguous()


def embed(w: Weight, ids: Tensor) -> Tensor:
    """Rows `ids` (int64 [T]) of the table as float32 [T, cols]. Raises `ValueError` for a row outside it."""
    check_embed(w, ids)
    check_canonical(w)
    check_range("row", ids, w.shape[0])
    rows = w.data.view(w.shape[0], -1)[ids].view(-1)
    return _values(rows, w.qtype).view(ids.shape[0], w.shape[1])


def moe_ffn(
    layout: ExpertLayout,
    batch: ExpertBatch,
    x: Tensor,
    out: Tensor,
    name: str = "silu",
    weights: Tensor | None = None,
) -> None:
    """As `kernels.moe_ffn`, expert by expert.

    Raises `ValueError` for a batch that does not fit, `UnsupportedError` for a type without code here.
    """
    act = activation(name)
    _, width = check_layout(layout)
    check_batch(layout, width, batch, x, out, weights)
    check_indices(batch, x.shape[0], len(out if weights is None else weights))
    for slot, tokens, dest in pairs_by_expert(batch):
        rows = x[tokens]
        hidden = glu(act, _product(layout, slot, "gate", rows), _product(layout, slot, "up", rows))
        deliver(_product(layout, slot, "down", hidden), tokens, dest, out, weights)


def pairs_by_expert(batch: ExpertBatch, most: int | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each slot with the tokens and the dest (int64) of its pairs, at most `most` of them at a time."""
    begin = 0
    for slot, count in zip(batch.slots, batch.counts, strict=True):
        end, step = begin + count, most or max(count, 1)
        for first in range(begin, end, step):
            some = slice(first, min(first + step, end))
            yield slot, batch.token[some].long(), batch.dest[some].long()
        begin = end


def deliver(found: Tensor, tokens: Tensor, dest: Tensor, out: Tensor, weights: Tensor | None) -> None:
    """What one expert found [n, D] for n different `tokens`: to where `moe_ffn` has it."""
    if weights is None:
        out[dest] = found
    else:
        out[tokens] += weights[dest, None] * found


def glu(act: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of `act`, element by element."""
    if act.code == 0:
        return torch.nn.functional.silu(gate) * up
    if act.code == 1:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    return gate * torch.sigmoid(act.alpha * gate) * (up + 1)


def _product(layout: ExpertLayout, slot: Tensor, name: str, x: Tensor) -> Tensor:
    def values(key: str) -> Tensor | None:
        section = layout.sections.get(key)
        if section is None:
            return None
        if section.layout != CANONICAL:
            raise UnsupportedError(f"section layout {section.layout!r} cannot be computed on {slot.device}")
        return _values(slot[section.offset : section.offset + section.nbytes], section.qtype).view(
            section.shape
        )

    weight, scale, bias = values(name), values(f"{name}_scale"), values(f"{name}_bias")
    if weight is None:
        raise ValueError(f"the expert has no {name} section")
    y = x @ weight.T
    if scale is not None:
        y = y * scale
    return y if bias is None else y + bias

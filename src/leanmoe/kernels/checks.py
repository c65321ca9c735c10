"""Checks of what a product is given. A bad call raises `ValueError` before anything is read."""

import math
from collections.abc import Sequence

import torch

from leanmoe.errors import UnsupportedError
from leanmoe.kernels.types import ExpertBatch, Weight
from leanmoe.pack.layout import CANONICAL, ExpertLayout, Section

_DIMENSIONS = {"gate": 2, "up": 2, "down": 2}


def check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, dims: int, device: torch.device
) -> None:
    """`tensor` must be contiguous, of this type and number of dimensions, on `device`."""
    if tensor.dtype != dtype or tensor.dim() != dims or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dims}-dimensional {dtype} tensor on {device}, not "
            f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}"
        )


def check_linear(w: Weight, x: torch.Tensor) -> None:
    """`w` and `x` must fit: x float32 [T, cols], on the weight's device."""
    check_tensor("x", x, torch.float32, 2, w.data.device)
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"x has {x.shape[1]} columns, the weight has {w.shape[1]}")


def check_linear_each(w: Weight, x: torch.Tensor) -> int:
    """x float32 [T, count, cols] must fit `count` equal runs of the rows of `w`. Returns the rows of one."""
    check_tensor("x", x, torch.float32, 3, w.data.device)
    _, count, cols = x.shape
    if count < 1 or w.shape[0] < count or w.shape[0] % count or cols != w.shape[1]:
        raise ValueError(f"x has {count} parts of {cols}, the weight {w.shape[0]} rows of {w.shape[1]}")
    return w.shape[0] // count


def check_embed(w: Weight, ids: torch.Tensor) -> None:
    """`ids` must be int64 [T] on the weight's device; their range is checked where they are read."""
    check_tensor("ids", ids, torch.int64, 1, w.data.device)


def check_canonical(w: Weight) -> None:
    """Raises `UnsupportedError` for a weight whose bytes were rearranged for the processor's products."""
    if w.layout != CANONICAL:
        raise UnsupportedError(
            f"a weight in layout {w.layout} cannot be computed on {w.data.device} like this"
        )


def check_layout(layout: ExpertLayout) -> tuple[int, int]:
    """(F, D): hidden and model width of an expert whose sections fit together and lie inside its file."""
    for name in ("gate", "up", "down"):
        if name not in layout.sections:
            raise ValueError(f"the expert has no {name} section")
    inner, width = _pair(layout.sections["gate"])
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    sizes = {"gate": inner, "up": inner, "down": width}
    for name, section in layout.sections.items():
        matrix, _, extra = name.partition("_")
        if matrix not in _DIMENSIONS or extra not in ("", "bias", "scale"):
            raise ValueError(f"an expert has no section named {name}")
        if extra:
            wanted = sizes[matrix] if extra == "bias" else 1
            good = (
                section.qtype.name == "F32"
                and math.prod(section.shape) == wanted
                and section.nbytes == 4 * wanted
            )
        else:
            good = section.shape == shapes[
                matrix
            ] and section.nbytes == inner * width // section.qtype.block * (section.qtype.block_bytes)
            good = good and section.shape[1] % section.qtype.block == 0
        if not good:
            raise ValueError(f"section {name} ({section}) does not fit an expert of F={inner}, D={width}")
        if section.offset < 0 or section.offset + section.nbytes > layout.file_bytes:
            raise ValueError(f"section {name} ends outside the expert's {layout.file_bytes} bytes")
    return inner, width


def check_indices(batch: ExpertBatch, tokens: int, out_rows: int) -> None:
    """The values of a batch's counts and indices: `tokens` rows of x, `out_rows` rows of the output."""
    if sum(batch.counts) != batch.token.shape[0] or min(batch.counts, default=0) < 0:
        raise ValueError(f"counts {list(batch.counts)} do not sum to {batch.token.shape[0]} token indices")
    check_range("token", batch.token, tokens)
    check_range("dest", batch.dest, out_rows)


def check_range(name: str, index: torch.Tensor, rows: int) -> None:
    """Every index must name one of `rows` rows."""
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= rows):
        raise ValueError(f"{name} index is outside 0 to {rows - 1}")


def _pair(section: Section) -> tuple[int, int]:
    if len(section.shape) != 2 or min(section.shape) <= 0:
        raise ValueError(f"gate must be a matrix, not {section.shape}")
    return section.shape[0], section.shape[1]


def check_batch(
    layout: ExpertLayout,
    width: int,
    batch: ExpertBatch,
    x: torch.Tensor,
    out: torch.Tensor,
    weights: torch.Tensor | None,
    rounded_bytes: int = 0,
) -> None:
    """Everything about a batch but the values of its indices, which are checked where they are read.

    x may be tokens of `rounded_bytes` instead of floats.
    """
    device = x.device
    check_tensor("x", x, torch.uint8 if rounded_bytes else torch.float32, 2, device)
    check_tensor("out", out, torch.float32, 2, device)
    check_tensor("token", batch.token, torch.int32, 1, device)
    check_tensor("dest", batch.dest, torch.int32, 1, device)
    if x.shape[1] != (rounded_bytes or width) or out.shape[1] != width:
        raise ValueError(f"x and out have {x.shape[1]} and {out.shape[1]} columns, the experts have {width}")
    if weights is not None:
        check_tensor("weights", weights, torch.float32, 1, device)
        if len(out) != len(x):
            raise ValueError(f"x and out have {len(x)} and {len(out)} rows: a sum is of what each token has")
    if batch.token.shape != batch.dest.shape or len(batch.slots) != len(batch.counts):
        raise ValueError("a batch needs as many counts as slots, and as many dest as token indices")
    check_slots(layout, batch.slots, device)


def check_slots(layout: ExpertLayout, slots: Sequence[torch.Tensor], device: torch.device) -> None:
    """Each slot must hold a whole expert of this layout on `device`."""
    size = layout.file_bytes
    for slot in slots:
        if (
            slot.dtype != torch.uint8
            or slot.numel() != size
            or slot.device != device
            or not slot.is_contiguous()
        ):
            raise ValueError(
                f"a slot must be {size} contiguous uint8 on {device}, "
                f"not {slot.numel()} {slot.dtype} on {slot.device}"
            )


def check_convolution(recent: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """The tensors of a short convolution over at least two tokens must fit each other."""
    for name, tensor in (("x", x), ("recent", recent), ("weight", weight)):
        check_tensor(name, tensor, torch.float32, 2, x.device)
    taps, channels = weight.shape
    if taps < 2 or recent.shape != (taps - 1, channels) or x.shape[1] != channels or not x.numel():
        raise ValueError(
            f"x {tuple(x.shape)}, recent {tuple(recent.shape)} and weight {tuple(weight.shape)} do not make a "
            "convolution"
        )


def check_delta(
    memory: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The tensors of a delta rule must fit each other; the key heads must divide the heads."""
    check_tensor("memory", memory, torch.float32, 3, memory.device)
    check_tensor("q", q, torch.float32, 3, memory.device)
    heads, key_dim, value_dim = memory.shape
    tokens, key_heads, _ = q.shape
    if tokens < 1 or key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"{tokens} tokens with {key_heads} key heads for {heads} memories do not make a delta rule"
        )
    wanted: dict[str, tuple[torch.Tensor, tuple[int, ...]]]
    wanted = {"q": (q, (tokens, key_heads, key_dim)), "k": (k, (tokens, key_heads, key_dim))}
    wanted |= {"v": (v, (tokens, heads, value_dim)), "out": (out, (tokens, heads, value_dim))}
    wanted |= {"beta": (beta, (tokens, heads)), "decay": (decay, (tokens, heads))}
    for name, (tensor, shape) in wanted.items():
        check_tensor(name, tensor, torch.float32, len(shape), memory.device)
        if tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; beside the others {shape} was wanted")


def check_decays(beta: torch.Tensor, alpha: torch.Tensor, step: torch.Tensor, rate: torch.Tensor) -> None:
    """beta, alpha [N, heads] and step, rate [heads] must fit each other."""
    check_tensor("beta", beta, torch.float32, 2, beta.device)
    wanted = {"alpha": (alpha, beta.shape), "step": (step, beta.shape[1:]), "rate": (rate, beta.shape[1:])}
    for name, (tensor, shape) in wanted.items():
        check_tensor(name, tensor, torch.float32, len(shape), beta.device)
        if tensor.shape != shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} does not fit beta {tuple(beta.shape)}")


def check_columns(part: torch.Tensor, first: torch.Tensor) -> int:
    """A part [N, heads, D] of rows of as many tokens as `first` has. Returns the numbers of one row."""
    if part.dtype != torch.float32 or part.dim() != 3 or part.stride(-1) != 1 or len(part) != len(first):
        raise ValueError(
            f"{tuple(part.shape)} {part.dtype} cannot be part of rows beside {tuple(first.shape)}"
        )
    return part.shape[1] * part.shape[2]


def check_norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    """x float32 [..., width] must fit the norm's weight [width]."""
    check_tensor("weight", weight, torch.float32, 1, x.device)
    check_tensor("x", x, torch.float32, x.dim(), x.device)
    if x.dim() < 1 or not weight.numel() or x.shape[-1] != weight.numel():
        raise ValueError(f"x {tuple(x.shape)} does not fit a norm of {weight.numel()}")


def check_turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor | None) -> None:
    """x [T, heads, dim] must fit cos and sin [T, 1, at most dim / 2] and the heads' norm [dim]."""
    check_tensor("x", x, torch.float32, 3, x.device)
    check_tensor("cos", cos, torch.float32, 3, x.device)
    check_tensor("sin", sin, torch.float32, 3, x.device)
    tokens, heads, dim = x.shape
    if cos.shape != sin.shape or cos.shape[:2] != (tokens, 1) or 2 * cos.shape[2] > dim or not heads:
        raise ValueError(f"heads {tuple(x.shape)} cannot be turned by {tuple(cos.shape)}, {tuple(sin.shape)}")
    if norm is not None:
        check_norm(x, norm)


def check_route(logits: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Router logits [N, E], and the bias [E] of the choice."""
    check_tensor("logits", logits, torch.float32, 2, logits.device)
    if bias is not None:
        check_tensor("bias", bias, torch.float32, 1, logits.device)
        if bias.numel() != logits.shape[1]:
            raise ValueError(f"a bias of {bias.numel()} does not fit {logits.shape[1]} experts")


def check_sum(
    rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, onto: torch.Tensor | None
) -> None:
    """rows [N, k, D], weights [N, k], ids [N, k] and onto [N, D] must fit each other."""
    check_tensor("rows", rows, torch.float32, 3, rows.device)
    if onto is not None:
        check_tensor("onto", onto, torch.float32, 2, rows.device)
        if onto.shape != (rows.shape[0], rows.shape[2]):
            raise ValueError(f"rows {tuple(rows.shape)} cannot be added onto {tuple(onto.shape)}")
    for name, tensor, dtype in (("weights", weights, torch.float32), ("ids", ids, torch.int64)):
        check_tensor(name, tensor, dtype, 2, rows.device)
        if tensor.shape != rows.shape[:2]:
            raise ValueError(f"rows {tuple(rows.shape)} have no {name} {tuple(tensor.shape)}")


def check_one_token(x: torch.Tensor, out: torch.Tensor, width: int) -> None:
    """x [1, D] and out [R, D] must be those of a token and some experts of width D."""
    check_tensor("x", x, torch.float32, 2, x.device)
    check_tensor("out", out, torch.float32, 2, x.device)
    if x.shape != (1, width) or out.shape[1] != width:
        raise ValueError(
            f"x {tuple(x.shape)} and out {tuple(out.shape)} are not of one token and experts of width {width}"
        )


def check_token(ids: torch.Tensor, x: torch.Tensor, out: torch.Tensor, width: int) -> None:
    """One token's experts ids [1, k], x [1, D] and out [k, D] must fit experts of width D."""
    check_tensor("ids", ids, torch.int64, 2, x.device)
    check_one_token(x, out, width)
    if ids.shape != (1, len(out)):
        raise ValueError(f"ids {tuple(ids.shape)} are not those of one token, with out {tuple(out.shape)}")


def check_add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None) -> None:
    """x [N, D], what is added to it, y [N, D] or [D], and `out` [N, D] must fit each other."""
    check_tensor("x", x, torch.float32, 2, x.device)
    if out is not None:
        check_tensor("out", out, torch.float32, 2, x.device)
        if out.shape != x.shape:
            raise ValueError(f"out {tuple(out.shape)} cannot take the sum of x {tuple(x.shape)}")
    check_tensor("y", y, torch.float32, 1 if y.dim() == 1 else 2, x.device)
    if y.shape != (x.shape if y.dim() == 2 else x.shape[1:]):
        raise ValueError(f"y {tuple(y.shape)} cannot be added to x {tuple(x.shape)}")


def check_glu(gate: torch.Tensor, up: torch.Tensor) -> None:
    """gate and up [N, F] must have one shape."""
    check_tensor("gate", gate, torch.float32, 2, gate.device)
    check_tensor("up", up, torch.float32, 2, gate.device)
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} do not fit each other")


def check_gate(x: torch.Tensor, gate: torch.Tensor) -> None:
    """x [N, D] and its gate [N, D] or [N, 1] must fit each other."""
    check_tensor("x", x, torch.float32, 2, x.device)
    check_tensor("gate", gate, torch.float32, 2, x.device)
    if gate.shape not in (x.shape, (x.shape[0], 1)):
        raise ValueError(f"a gate {tuple(gate.shape)} does not fit x {tuple(x.shape)}")


def check_attend(
    tokens: int,
    kept: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    position: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """q, out [tokens, heads, dim], k, v [tokens, kv_heads, dim] and cache [kept, kv_heads, capacity, dim] must fit."""
    if cache.dtype not in (torch.float16, torch.float32) or cache.dim() != 4 or not cache.is_contiguous():
        raise ValueError(
            f"the cache is {tuple(cache.shape)} {cache.dtype}; wanted 4 dimensions, float16 or 32"
        )
    found, kv_heads, capacity, dim = cache.shape
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        check_tensor(name, tensor, torch.float32, 3, cache.device)
    good = found == kept and tokens > 0 and 0 <= position <= capacity - tokens and k.shape == v.shape
    good = good and q.shape == out.shape == (tokens, q.shape[1], dim) and k.shape == (tokens, kv_heads, dim)
    if not good:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} and out {tuple(out.shape)} do not fit a "
            f"cache of {tuple(cache.shape)} at position {position}"
        )
    if sinks is not None:
        check_tensor("sinks", sinks, torch.float32, 1, cache.device)
        if sinks.numel() != q.shape[1]:
            raise ValueError(f"{sinks.numel()} sinks do not fit {q.shape[1]} heads")

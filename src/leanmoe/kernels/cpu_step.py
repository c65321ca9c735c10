"""What happens to a token between the products, on the CPU: checks, then the C++ extension.

Each row is computed by itself, so its bits depend neither on the other rows nor on the number of threads.
"""

from collections.abc import Sequence

import torch

from leanmoe.kernels import _cpu
from leanmoe.kernels.checks import (
    check_add,
    check_attend,
    check_columns,
    check_decays,
    check_gate,
    check_glu,
    check_norm,
    check_route,
    check_sum,
    check_tensor,
    check_turn,
)
from leanmoe.kernels.tape import address_of, empty, recording
from leanmoe.kernels.types import GATINGS, RoutingRule, activation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `kernels.rms_norm`. Raises `ValueError` for tensors that do not fit."""
    x = contiguous(x)
    check_norm(x, weight)
    out, width = empty(x.shape), weight.numel()
    _cpu.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
    return out


def turn_heads(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    apart: bool,
    norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """As `kernels.turn_heads`. Raises `ValueError` for tensors that do not fit."""
    x = contiguous(x)
    check_turn(x, cos, sin, norm)
    out, (tokens, heads, dim) = empty(x.shape), x.shape
    _cpu.turn_heads(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        0 if norm is None else norm.data_ptr(),
        out.data_ptr(),
        tokens,
        heads,
        dim,
        cos.shape[-1],
        apart,
        eps,
    )
    return out


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, rule: RoutingRule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `kernels.route`; of equal scores the lower id comes first. Raises `ValueError` for what does not fit."""
    check_route(logits, bias)
    tokens, experts = logits.shape
    ids = empty((tokens, rule.top_k), torch.int64)
    weights, chances = empty((tokens, rule.top_k)), empty(logits.shape)
    _cpu.route(
        logits.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        chances.data_ptr(),
        tokens,
        experts,
        rule.top_k,
        rule.groups,
        rule.groups_used,
        GATINGS[rule.gating],
        rule.renormalise,
        rule.group_score == "top2",
        rule.scale,
    )
    return ids, weights, chances


def weighted_sum(
    rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, onto: torch.Tensor | None
) -> torch.Tensor:
    """As `kernels.weighted_sum`. Raises `ValueError` for tensors that do not fit."""
    check_sum(rows, weights, ids, onto)
    tokens, count, width = rows.shape
    out = empty((tokens, width))
    _cpu.weighted_sum(
        rows.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        0 if onto is None else onto.data_ptr(),
        out.data_ptr(),
        tokens,
        count,
        width,
    )
    return out


def add(x: torch.Tensor, y: torch.Tensor, scale: float, out: torch.Tensor | None) -> torch.Tensor:
    """As `kernels.add`. Raises `ValueError` for tensors that do not fit."""
    check_add(x, y, out)
    out, width = empty(x.shape) if out is None else out, x.shape[-1]
    _cpu.add(x.data_ptr(), y.data_ptr(), out.data_ptr(), x.shape[0], width, scale, y.dim() == 1)
    return out


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """As `kernels.scaled`. Raises `ValueError` for a tensor that does not fit."""
    check_tensor("x", x, torch.float32, 2, x.device)
    out, (rows, width) = empty(x.shape), x.shape
    _cpu.scale(x.data_ptr(), out.data_ptr(), rows, width, factor)
    return out


def glu(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """As `kernels.glu`. Raises `ValueError` for tensors that do not fit."""
    check_glu(gate, up)
    out = empty(gate.shape)
    _cpu.glu(*activation(name).numbers, gate.data_ptr(), up.data_ptr(), out.data_ptr(), *gate.shape)
    return out


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As `kernels.sigmoid_gate`. Raises `ValueError` for tensors that do not fit."""
    check_gate(x, gate)
    out, (rows, width) = empty(x.shape), x.shape
    whole = gate.shape[1] == 1
    _cpu.sigmoid_gate(x.data_ptr(), gate.data_ptr(), out.data_ptr(), rows, width, whole)
    return out


def angles(
    frequencies: torch.Tensor, positions: torch.Tensor, magnitude: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.angles`. Raises `ValueError` for tensors that do not fit."""
    check_tensor("frequencies", frequencies, torch.float64, 1, frequencies.device)
    check_tensor("positions", positions, torch.int64, 1, frequencies.device)
    tokens, half = positions.numel(), frequencies.numel()
    cos, sin = (empty((tokens, 1, half), lasting=True) for _ in range(2))
    made = cos.data_ptr(), sin.data_ptr()
    _cpu.angles(frequencies.data_ptr(), positions.data_ptr(), *made, tokens, half, magnitude)
    return cos, sin


def decays(
    beta: torch.Tensor, alpha: torch.Tensor, step: torch.Tensor, rate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.decays`. Raises `ValueError` for tensors that do not fit."""
    check_decays(beta, alpha, step, rate)
    share, decay, (tokens, heads) = empty(beta.shape), empty(beta.shape), beta.shape
    _cpu.decays(
        beta.data_ptr(),
        alpha.data_ptr(),
        step.data_ptr(),
        rate.data_ptr(),
        share.data_ptr(),
        decay.data_ptr(),
        tokens,
        heads,
    )
    return share, decay


def unit(x: torch.Tensor, eps: float, scale: float) -> torch.Tensor:
    """As `kernels.unit`. Raises `ValueError` for a tensor that does not fit."""
    x = contiguous(x)
    check_tensor("x", x, torch.float32, x.dim(), x.device)
    out, width = empty(x.shape), x.shape[-1]
    _cpu.unit(x.data_ptr(), out.data_ptr(), x.numel() // width, width, eps, scale)
    return out


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """As `kernels.contiguous`."""
    if x.is_contiguous():
        return x
    if x.dtype != torch.float32 or x.dim() > 3 or x.stride(-1) != 1 or not x.numel():
        assert recording() is None, "a copy by torch would be missing on the tape"
        return x.contiguous()
    out = empty(x.shape)
    _copy(x, out)
    return out


def columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `kernels.columns`. Raises `ValueError` for tensors that do not fit."""
    widths = [check_columns(part, parts[0]) for part in parts]
    out, begin = empty((len(parts[0]), sum(widths))), 0
    for part, width in zip(parts, widths, strict=True):
        _copy(part, out[:, begin : begin + width].view(part.shape))
        begin += width
    return out


def _copy(x: torch.Tensor, out: torch.Tensor) -> None:
    """Both float32 of one shape, of at most three dimensions, numbers of the last one next to each other."""
    outer, inner, width = (1, 1, *x.shape)[-3:]
    strides = (stride for each in (x, out) for stride in (0, 0, *each.stride())[-3:-1])
    _cpu.copy(x.data_ptr(), out.data_ptr(), outer, inner, width, *strides)


def largest(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.largest`. Raises `ValueError` if there are fewer numbers than `count`, NaNs left out."""
    check_tensor("x", x, torch.float32, 1, x.device)
    values, places = torch.empty(count), torch.empty(count, dtype=torch.int64)
    found = _cpu.largest(x.data_ptr(), x.numel(), count, values.data_ptr(), places.data_ptr())
    if found < count:
        raise ValueError(f"of {x.numel()} numbers {found} are numbers; {count} were wanted")
    return values, places


def can_attend(heads: int, kv_heads: int, dim: int) -> bool:
    """Whether `attend_next` and `attend_chunk` take heads like these."""
    return heads % kv_heads == 0 and dim % _cpu.ATTEND_DIM == 0 and dim <= _cpu.ATTEND_MOST_DIM


def attend_next(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    position: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """As `kernels.attention.attend_next`. Raises `ValueError` for tensors that do not fit."""
    check_attend(1, 2, q, k, v, cache, position, sinks, out)
    _, kv_heads, capacity, dim = cache.shape
    tape, cache_at = recording(), address_of(cache)
    position_at = torch.tensor(position) if tape is None else tape.position
    _cpu.attend(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        cache_at.data_ptr(),
        position_at.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        q.shape[-2],
        kv_heads,
        dim,
        capacity,
        capacity if window is None else window,
        scale,
        cache.dtype is torch.float16,
    )


def attend_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    start: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """As `kernels.attention.attend_chunk`. Raises `ValueError` for tensors that do not fit."""
    check_attend(len(q), 1 if v is k else 2, q, k, v, cache, start, sinks, out)
    both, kv_heads, capacity, dim = cache.shape
    keys = cache.data_ptr()
    _cpu.attend_chunk(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        keys,
        keys + (both - 1) * kv_heads * capacity * dim * cache.element_size(),
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        len(q),
        q.shape[1],
        kv_heads,
        dim,
        capacity,
        start,
        capacity if window is None else window,
        scale,
        cache.dtype is torch.float16,
    )

"""What happens to a token between the products, on the CPU: checks, then the C++ extension.

Each row is computed by itself, so its bits depend neither on the other rows nor on the number of threads.
"""

import torch

from leanmoe.kernels import _cpu
from leanmoe.kernels.checks import check_attend, check_norm, check_route, check_sum, check_tensor, check_turn
from leanmoe.kernels.types import GATINGS, RoutingRule


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `kernels.rms_norm`. Raises `ValueError` for tensors that do not fit."""
    x = x.contiguous()
    check_norm(x, weight)
    out, width = torch.empty_like(x), weight.numel()
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
    x = x.contiguous()
    check_turn(x, cos, sin, norm)
    out, (tokens, heads, dim) = torch.empty_like(x), x.shape
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
    ids = torch.empty((tokens, rule.top_k), dtype=torch.int64)
    weights, chances = torch.empty((tokens, rule.top_k)), torch.empty_like(logits)
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


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As `kernels.weighted_sum`. Raises `ValueError` for tensors that do not fit."""
    check_sum(rows, weights)
    tokens, count, width = rows.shape
    out = torch.empty((tokens, width))
    _cpu.weighted_sum(rows.data_ptr(), weights.data_ptr(), out.data_ptr(), tokens, count, width)
    return out


def largest(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.largest`. Raises `ValueError` if there are fewer numbers than `count`, NaNs left out."""
    check_tensor("x", x, torch.float32, 1, x.device)
    values, places = torch.empty(count), torch.empty(count, dtype=torch.int64)
    found = _cpu.largest(x.data_ptr(), x.numel(), count, values.data_ptr(), places.data_ptr())
    if found < count:
        raise ValueError(f"of {x.numel()} numbers {found} are numbers; {count} were wanted")
    return values, places


def can_attend(heads: int, kv_heads: int, dim: int) -> bool:
    """Whether `attend_next` takes heads like these."""
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
    check_attend(q, k, v, cache, position, sinks, out)
    _, kv_heads, capacity, dim = cache.shape
    keys = cache.data_ptr()
    _cpu.attend(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        keys,
        keys + kv_heads * capacity * dim * cache.element_size(),
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        q.shape[-2],
        kv_heads,
        dim,
        capacity,
        0 if window is None else max(0, position + 1 - window),
        position + 1,
        scale,
        cache.dtype is torch.float16,
    )

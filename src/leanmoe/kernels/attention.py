"""Softmax attention that also returns its normaliser, so that parts over different keys can be put together.

With the logarithms of the normalisers, attention over the union of two sets of keys is a weighted mean of the two
(Milakov and Gimelshein 2018): a long past needs no mask, however long it is.
"""

import torch
from torch import Tensor

from leanmoe.kernels import cpu_step

# Keys that the plain form takes at a time: bounds its scores, whatever the length.
_KEY_BLOCK = 1024
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`softmax(scale q k^T + mask) v` [H, T, D] in the type of q, and log of the softmax's sum [H, T] float32.

    q is [H, T, D], k and v [G, S, D] of the same type: H / G consecutive query heads share a key head. With
    `causal`, query i sees keys up to i, and T is S. `mask` [T, S] is added to the scores, in q's type.
    """
    if q.device.type != "cpu":
        return plain_attention(q, k, v, scale, causal=causal, mask=mask)
    out, lse = _fused(q[None], k[None], v[None], 0.0, causal, attn_mask=mask, scale=scale)
    return out[0], lse[0]


def can_attend(device: torch.device, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether `attend_next` and `attend_chunk` take heads like these, on that device."""
    return device.type == "cpu" and cpu_step.can_attend(heads, kv_heads, dim)


def attend_next(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    position: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """The attention of a sequence's next token, in one call: stores its key and value, and reads each key once.

    q, out [1, heads, D]; k, v [1, kv_heads, D]; cache [2, kv_heads, capacity, D], float16 or float32, holds the keys
    and values of the tokens before `position`. The token sees the last `window` keys, its own included, or all.
    `sinks` [heads] as in `joined`. The scores are float32, and the bits do not depend on the number of threads.
    """
    cpu_step.attend_next(q, k, v, cache, position, scale, window, sinks, out)


def attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    start: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Causal attention of consecutive tokens of a sequence, in one call; stores their keys and values first.

    q, out [T, heads, D]; k, v [T, kv_heads, D]; cache [2, kv_heads, capacity, D], float16 or float32, holds the keys
    and values of the `start` tokens before. If v is the very tensor k, values are the keys, and cache is [1, ...].
    A token sees the last `window` keys, its own included, or all; `sinks` [heads] as in `joined`. Queries, scores and
    sums are float32, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). A token's bits depend
    neither on the number of threads nor on the other tokens of the call: a prompt may be cut anywhere. (`attend_next`
    adds up in another order.)
    """
    cpu_step.attend_chunk(q, k, v, cache, start, scale, window, sinks, out)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `attention`, in plain torch on any device, with float32 scores of some keys at a time."""
    heads, tokens, _ = q.shape
    if causal:
        mask = torch.full((tokens, tokens), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    grouped = q.view(k.shape[0], -1, tokens, q.shape[2]).float()
    outs, sums = [], []
    for begin in range(0, k.shape[1], _KEY_BLOCK):
        part = slice(begin, begin + _KEY_BLOCK)
        scores = grouped @ k[:, None, part].float().transpose(-1, -2) * scale
        if mask is not None:
            scores += mask[:, part]
        # Queries that see none of these keys weigh nothing, rather than NaN.
        top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        weights = (scores - top).exp_()
        total = weights.sum(-1, keepdim=True)
        outs.append((weights @ v[:, None, part].float() / total.clamp_min(1e-30)).view(heads, tokens, -1))
        sums.append((total.log() + top).view(heads, tokens))
    out, lse = joined(outs, sums)
    return out.to(q.dtype), lse


def joined(outs: list[Tensor], sums: list[Tensor], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from that over each part: outs [H, T, D] and log sums [H, T] of each.

    `sinks` [H] are scores of a key without a value: they take their share of the softmax. Returns float32.
    """
    if len(outs) == 1 and sinks is None:
        return outs[0].float(), sums[0]
    scores = sums if sinks is None else [*sums, sinks[:, None].expand_as(sums[0])]
    total = torch.stack(scores).logsumexp(0)
    out = outs[0] * (sums[0] - total).exp_()[..., None]
    for more, lse in zip(outs[1:], sums[1:], strict=True):
        out += more * (lse - total).exp_()[..., None]
    return out, total

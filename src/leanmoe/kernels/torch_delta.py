"""The parts of a gated delta net in plain torch, on any device. A GPU computes with them.

Of the delta rule, one token takes one step. Several are taken in blocks of `BLOCK`, the chunked form of Yang, Kautz
and Hatamizadeh, "Gated Delta Networks" (2024): what each token writes solves a triangular system, and the memory is
read and written once for the block.
"""

import torch
from torch import Tensor

from leanmoe.kernels.checks import check_convolution, check_delta

BLOCK = 64


def short_convolution(recent: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """As `kernels.short_convolution`. Raises `ValueError` for tensors that do not fit."""
    check_convolution(recent, x, weight)
    tokens, window = len(x), torch.cat((recent, x))
    out = window[:tokens] * weight[0]
    for tap in range(1, len(weight)):
        out.addcmul_(window[tap : tap + tokens], weight[tap])
    recent.copy_(window[tokens:])
    return torch.nn.functional.silu(out, inplace=True)


def delta_rule(
    memory: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    out: Tensor,
    *,
    grouped: bool,
) -> None:
    """As `kernels.delta_rule`. Raises `ValueError` for tensors that do not fit."""
    check_delta(memory, q, k, v, beta, decay, out)
    repeats = memory.shape[0] // q.shape[1]

    def for_heads(x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return x.repeat_interleave(repeats, dim=0) if grouped else x.repeat(repeats, 1, 1)

    q, k, v, out = for_heads(q), for_heads(k), v.transpose(0, 1), out.transpose(0, 1)
    beta, decay = beta.t()[..., None], decay.t()[..., None]
    if q.shape[1] == 1:
        _step(memory, q, k, v, beta, decay, out)
        return
    for begin in range(0, q.shape[1], BLOCK):
        at = (slice(None), slice(begin, begin + BLOCK))
        _block(memory, q[at], k[at], v[at], beta[at], decay[at], out[at])


def _step(memory: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, out: Tensor) -> None:
    """One token; shapes as in `_block` with C = 1."""
    keep = decay.exp()
    # What q and k find, in one reading of the memory: the new one gives q what the old did, plus what is written.
    found = torch.bmm(torch.cat((q, k), dim=1), memory).mul_(keep)
    written = (v - found[:, 1:]).mul_(beta)
    out.copy_(found[:, :1] + (q * k).sum(-1, keepdim=True) * written)
    memory.mul_(keep).addcmul_(k.transpose(1, 2), written)


def _block(memory: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, out: Tensor) -> None:
    """C tokens: q, k [heads, C, key_dim], v, out [heads, C, value_dim], beta, decay [heads, C, 1]."""
    since = decay.cumsum(1)  # log of what is left at t of the memory before the block
    between = (
        (since - since.transpose(1, 2)).clamp_(max=0).exp_()
    )  # [heads, t, s]: left at t of a write at s <= t
    keep = since.exp()
    system = torch.bmm(k, k.transpose(1, 2)).mul_(between).mul_(beta)
    wanted = torch.baddbmm(v, k * keep, memory, alpha=-1).mul_(beta)
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    seen = torch.bmm(q, k.transpose(1, 2)).mul_(between).tril_()
    out.copy_(torch.bmm(q * keep, memory).baddbmm_(seen, written))
    left = between[:, -1, :, None]  # of each write at the end of the block
    memory.mul_(keep[:, -1:]).baddbmm_((k * left).transpose(1, 2), written)

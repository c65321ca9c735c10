"""Gated delta net: attention's place taken by a memory of fixed size, which decays and corrects itself.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024). Per value head, with state S [key_dim, value_dim]:
`S <- e^g S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q`, for one token after the other. Several tokens are
taken at once in its chunked form: what each writes, `d`, solves a triangular system.
"""

from functools import partial
from itertools import pairwise

import torch
from torch.nn.functional import silu, softplus

from leanmoe.kernels import linear
from leanmoe.models.batch import Batch
from leanmoe.models.norm import RMSNorm
from leanmoe.models.rope import RopeTables
from leanmoe.models.spec import DELTA_BLOCK, DeltaNetSpec, ModelSpec
from leanmoe.models.state import RecurrentState
from leanmoe.models.trunk import Trunk
from leanmoe.models.workers import Workers

# Numbers of state times tokens below which handing heads to other threads costs more than it gives.
_PARALLEL_WORK = 1 << 18


class DeltaNet:
    """One layer: projections, a short causal convolution over each channel, the delta rule, a gated norm."""

    def __init__(
        self, trunk: Trunk, spec: ModelSpec, mixer: DeltaNetSpec, layer: int, workers: Workers
    ) -> None:
        m, prefix = mixer, f"blk.{layer}."
        self.spec, self.layer, self.workers, self.eps = m, layer, workers, spec.eps
        values = m.value_heads * m.value_dim
        self.fused = trunk.has(prefix + "ssm_in.weight")
        if self.fused:
            self.qkvz = trunk.weight(prefix + "ssm_in.weight", m.channels + values, spec.hidden)
        else:
            self.qkv = trunk.weight(prefix + "attn_qkv.weight", m.channels, spec.hidden)
            self.z = trunk.weight(prefix + "attn_gate.weight", values, spec.hidden)
        if m.grouped:
            self.beta_alpha = trunk.weight(prefix + "ssm_ba.weight", 2 * m.value_heads, spec.hidden)
        else:
            self.beta = trunk.weight(prefix + "ssm_beta.weight", m.value_heads, spec.hidden)
            self.alpha = trunk.weight(prefix + "ssm_alpha.weight", m.value_heads, spec.hidden)
        self.rate = trunk.vector(prefix + "ssm_a", m.value_heads)  # -e^A: below zero
        self.step = trunk.vector(prefix + "ssm_dt.bias", m.value_heads)
        taps = trunk.matrix(prefix + "ssm_conv1d.weight", m.channels, m.kernel)
        self.taps = taps.t().contiguous()  # [kernel, channels]; the last meets the token itself
        self.norm = RMSNorm(trunk.vector(prefix + "ssm_norm.weight", m.value_dim), spec.eps)
        self.out = trunk.weight(prefix + "ssm_out.weight", spec.hidden, values)

    def new_state(self, capacity: int, dtype: torch.dtype) -> RecurrentState:
        """An empty memory, float32 whatever the type of KV caches, of one size for any number of tokens."""
        m, device = self.spec, self.out.data.device
        return RecurrentState(
            torch.zeros(m.kernel - 1, m.channels, device=device),
            torch.zeros(m.value_heads, m.key_dim, m.value_dim, device=device),
        )

    def __call__(self, x: torch.Tensor, batch: Batch, tables: RopeTables) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden]; takes the N tokens into the memories of their sequences."""
        m = self.spec
        qkv, z = self._qkv_and_gate(x)
        beta, alpha = self._beta_and_alpha(x)
        beta, decay = beta.sigmoid(), softplus(alpha + self.step).mul_(self.rate)
        mixed = torch.empty(len(x), m.value_heads, m.value_dim, device=x.device)
        for segment in batch.segments:
            state = segment.state.recurrent(self.layer)
            for rows, saved in segment.pieces():
                self._advance(qkv[rows], beta[rows], decay[rows], state, mixed[rows])
                if saved:
                    state.save()
        y = self.norm(mixed).mul_(silu(z.view_as(mixed)))
        return linear(self.out, y.view(len(x), -1))

    def _qkv_and_gate(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, hidden] -> the channels before the convolution: all q, all k, all v [N, channels], and the gate."""
        if not self.fused:
            return linear(self.qkv, x), linear(self.z, x)
        m = self.spec
        values = m.value_heads // m.key_heads * m.value_dim
        each = linear(self.qkvz, x).view(len(x), m.key_heads, -1)
        *qkv, z = (
            part.flatten(1) for part in torch.split(each, [m.key_dim, m.key_dim, values, values], dim=-1)
        )
        return torch.cat(qkv, dim=-1), z

    def _beta_and_alpha(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, hidden] -> [N, value_heads] each."""
        if not self.spec.grouped:
            return linear(self.beta, x), linear(self.alpha, x)
        both = linear(self.beta_alpha, x).view(len(x), self.spec.key_heads, 2, -1)
        return both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)

    def _advance(
        self,
        qkv: torch.Tensor,
        beta: torch.Tensor,
        decay: torch.Tensor,
        state: RecurrentState,
        out: torch.Tensor,
    ) -> None:
        """Takes T tokens of one sequence: qkv [T, channels], beta, decay [T, heads] -> out [T, heads, value_dim]."""
        m, tokens = self.spec, len(qkv)
        keys = m.key_heads * m.key_dim
        q, k, v = torch.split(self._convolved(qkv, state), [keys, keys, m.value_heads * m.value_dim], dim=-1)
        q, k = (self._for_value_heads(self._unit(t.view(tokens, m.key_heads, m.key_dim))) for t in (q, k))
        q, v = q.mul_(m.key_dim**-0.5), v.view(tokens, m.value_heads, m.value_dim).transpose(0, 1)
        beta, decay, out = beta.t(), decay.t(), out.transpose(0, 1)

        def heads(part: slice) -> None:
            if tokens == 1:
                _step(state.memory[part], q[part], k[part], v[part], beta[part], decay[part], out[part])
                return
            for begin in range(0, tokens, DELTA_BLOCK):
                at = (part, slice(begin, begin + DELTA_BLOCK))
                _block(state.memory[part], q[at], k[at], v[at], beta[at], decay[at], out[at])

        work = state.memory.numel() * tokens
        pieces = min(self.workers.count, m.value_heads) if work >= _PARALLEL_WORK else 1
        ends = [m.value_heads * i // pieces for i in range(pieces + 1)]
        self.workers.run([partial(heads, slice(a, b)) for a, b in pairwise(ends)])

    def _convolved(self, qkv: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """silu of the causal convolution of each channel, [T, channels]; keeps the last inputs for the next call."""
        window = torch.cat((state.recent, qkv))
        mixed = window[: len(qkv)] * self.taps[0]
        for i in range(1, self.spec.kernel):
            mixed.addcmul_(window[i : i + len(qkv)], self.taps[i])
        state.recent.copy_(window[len(qkv) :])
        return silu(mixed, inplace=True)

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.square().sum(-1, keepdim=True).add_(self.eps).rsqrt_()

    def _for_value_heads(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, key_heads, key_dim] -> [value_heads, T, key_dim]: what each value head reads."""
        repeats = self.spec.value_heads // self.spec.key_heads
        x = x.transpose(0, 1)
        return x.repeat_interleave(repeats, dim=0) if self.spec.grouped else x.repeat(repeats, 1, 1)


def _step(
    memory: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One token. Shapes as in `_block` with C = 1."""
    keep = decay[..., None].exp()  # [heads, 1, 1]
    # What q and k find, in one reading of the memory: the new one gives q what the old did, plus what is written.
    found = torch.bmm(torch.cat((q, k), dim=1), memory).mul_(keep)  # [heads, 2, value_dim]
    written = (v - found[:, 1:]).mul_(beta[..., None])
    torch.add(found[:, :1], (q * k).sum(-1, keepdim=True) * written, out=out)
    memory.mul_(keep).addcmul_(k.transpose(1, 2), written)


def _block(
    memory: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """C consecutive tokens at once.

    memory [heads, key_dim, value_dim] is updated; q (scaled), k [heads, C, key_dim]; v, out [heads, C, value_dim];
    beta, decay (the logarithm) [heads, C].
    """
    since = decay.cumsum(-1)[..., None]  # log of what is left at t of the memory before the block
    between = (
        (since - since.transpose(1, 2)).clamp_(max=0).exp_()
    )  # [heads, t, s]: left at t of a write at s <= t
    keep = since.exp()
    beta = beta[..., None]
    system = torch.bmm(k, k.transpose(1, 2)).mul_(between).mul_(beta)
    wanted = torch.baddbmm(v, k * keep, memory, alpha=-1).mul_(beta)
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    seen = torch.bmm(q, k.transpose(1, 2)).mul_(between).tril_()
    out.copy_(torch.bmm(q * keep, memory).baddbmm_(seen, written))
    left = between[:, -1, :, None]  # of each write at the end of the block
    memory.mul_(keep[:, -1:]).baddbmm_((k * left).transpose(1, 2), written)

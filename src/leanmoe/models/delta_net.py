"""Gated delta net: attention's place taken by a memory of fixed size, which decays and corrects itself.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024); the convolution and the rule themselves are in `kernels`.
"""

import torch

from leanmoe.kernels import (
    columns,
    contiguous,
    decays,
    delta_rule,
    empty,
    glu,
    linear,
    short_convolution,
    unit,
)
from leanmoe.models.batch import Batch
from leanmoe.models.norm import RMSNorm
from leanmoe.models.rope import RopeTables
from leanmoe.models.spec import DeltaNetSpec, ModelSpec
from leanmoe.models.state import RecurrentState
from leanmoe.models.trunk import Trunk


class DeltaNet:
    """One layer: projections, a short causal convolution over each channel, the delta rule, a gated norm."""

    recordable = True

    def __init__(self, trunk: Trunk, spec: ModelSpec, mixer: DeltaNetSpec, layer: int, norm: RMSNorm) -> None:
        m, prefix = mixer, f"blk.{layer}."
        self.spec, self.layer, self.norm, self.eps = m, layer, norm, spec.eps
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
        self.out_norm = RMSNorm(trunk.vector(prefix + "ssm_norm.weight", m.value_dim), spec.eps)
        self.out = trunk.weight(prefix + "ssm_out.weight", spec.hidden, values)

    def new_state(self, capacity: int, dtype: torch.dtype) -> RecurrentState:
        """An empty memory, float32 whatever the type of KV caches, of one size for any number of tokens."""
        m, device = self.spec, self.out.data.device
        return RecurrentState(
            torch.zeros(m.kernel - 1, m.channels, device=device),
            torch.zeros(m.value_heads, m.key_dim, m.value_dim, device=device),
        )

    def __call__(self, h: torch.Tensor, batch: Batch, tables: RopeTables) -> torch.Tensor:
        """h [N, hidden] -> [N, hidden]; takes the N tokens into the memories of their sequences."""
        m, x = self.spec, self.norm(h)
        qkv, z = self._qkv_and_gate(x)
        beta, decay = decays(*self._beta_and_alpha(x), self.step, self.rate)
        mixed = empty((len(x), m.value_heads, m.value_dim), device=x.device)
        for segment in batch.segments:
            state = segment.state.recurrent(self.layer)
            for rows, saved in segment.pieces():
                self._advance(qkv[rows], beta[rows], decay[rows], state, mixed[rows])
                if saved:
                    state.save()
        y = glu(z, self.out_norm(mixed).view(len(x), -1), "silu")
        return linear(self.out, y)

    def remember(self, h: torch.Tensor, batch: Batch, tables: RopeTables) -> None:
        """As `Mixer` says."""
        self(h, batch, tables)  # most of which is taking them in

    def _qkv_and_gate(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, hidden] -> the channels before the convolution: all q, all k, all v [N, channels], and the gate."""
        if not self.fused:
            return linear(self.qkv, x), linear(self.z, x)
        m = self.spec
        values = m.value_heads // m.key_heads * m.value_dim
        each = linear(self.qkvz, x).view(len(x), m.key_heads, -1)
        *qkv, z = torch.split(each, [m.key_dim, m.key_dim, values, values], dim=-1)
        return columns(qkv), columns([z])

    def _beta_and_alpha(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, hidden] -> [N, value_heads] each."""
        if not self.spec.grouped:
            return linear(self.beta, x), linear(self.alpha, x)
        both = linear(self.beta_alpha, x).view(len(x), self.spec.key_heads, 2, -1)
        beta, alpha = (contiguous(part).view(len(x), -1) for part in both.unbind(2))
        return beta, alpha

    def _advance(
        self,
        qkv: torch.Tensor,
        beta: torch.Tensor,
        decay: torch.Tensor,
        state: RecurrentState,
        out: torch.Tensor,
    ) -> None:
        """Takes T tokens of one sequence: qkv [T, channels], beta, decay [T, heads] -> out [T, heads, value_dim]."""
        m, keys = self.spec, self.spec.key_heads * self.spec.key_dim
        mixed = short_convolution(state.recent, qkv, self.taps)
        q, k = (
            unit(contiguous(part).view(len(qkv), m.key_heads, m.key_dim), self.eps, scale)
            for part, scale in (
                (mixed[:, :keys], m.key_dim**-0.5),
                (mixed[:, keys : 2 * keys], 1.0),
            )
        )
        v = contiguous(mixed[:, 2 * keys :]).view(out.shape)
        delta_rule(state.memory, q, k, v, beta, decay, out, grouped=m.grouped)

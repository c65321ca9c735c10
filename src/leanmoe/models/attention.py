"""Grouped-query attention over the KV caches of the sequences in a batch."""

from collections.abc import Sequence

import torch

from leanmoe.kernels import add, contiguous, linear, linear_group, sigmoid_gate
from leanmoe.kernels.attention import attend_chunk, attend_next, attention, can_attend, joined
from leanmoe.models.batch import Batch, Segment
from leanmoe.models.norm import RMSNorm
from leanmoe.models.rope import Rope, RopeTables
from leanmoe.models.spec import MASKED_KEYS, QUERY_BLOCK, AttentionSpec, ModelSpec
from leanmoe.models.state import KVState
from leanmoe.models.trunk import Trunk


class Attention:
    """`out = W_o softmax(scale q k^T + causal mask) v` for one layer, over all of the past or a window of it."""

    def __init__(
        self, trunk: Trunk, spec: ModelSpec, mixer: AttentionSpec, layer: int, norm: RMSNorm
    ) -> None:
        a, prefix = mixer, f"blk.{layer}."
        self.spec, self.layer, self.norm = a, layer, norm
        divisors = ("rope_freqs.weight", a.rope.rotary_dim // 2)
        self.rope = Rope(a.rope, trunk.vector_if_present(*divisors) if a.rope.divided else None)
        q_size, kv_size = a.heads * a.head_dim, a.kv_heads * a.head_dim
        self.q = trunk.weight(prefix + "attn_q.weight", q_size * (2 if a.gated else 1), spec.hidden)
        self.k = trunk.weight(prefix + "attn_k.weight", kv_size, spec.hidden)
        self.v = None if a.shared_kv else trunk.weight(prefix + "attn_v.weight", kv_size, spec.hidden)
        remembered = [self.k] if self.v is None else [self.k, self.v]
        self.project, self.project_remembered = linear_group([self.q, *remembered]), linear_group(remembered)
        self.out = trunk.weight(prefix + "attn_output.weight", spec.hidden, q_size)
        self.q_bias = None if a.gated else trunk.vector_if_present(prefix + "attn_q.bias", q_size)
        self.k_bias = trunk.vector_if_present(prefix + "attn_k.bias", kv_size)
        self.v_bias = trunk.vector_if_present(prefix + "attn_v.bias", kv_size)
        self.out_bias = trunk.vector_if_present(prefix + "attn_output.bias", spec.hidden)
        self.sinks = trunk.vector(prefix + "attn_sinks.weight", a.heads) if a.sinks else None
        self.recordable = can_attend(self.out.data.device, a.heads, a.kv_heads, a.head_dim)
        if a.qk_norm is not None:
            whole = a.qk_norm == "full"
            self.q_norm = RMSNorm(
                trunk.vector(prefix + "attn_q_norm.weight", q_size if whole else a.head_dim), spec.eps
            )
            self.k_norm = RMSNorm(
                trunk.vector(prefix + "attn_k_norm.weight", kv_size if whole else a.head_dim), spec.eps
            )
        if a.v_norm:
            self.v_norm = RMSNorm(torch.ones(a.head_dim, device=self.k.data.device), spec.eps)

    def new_state(self, capacity: int, dtype: torch.dtype) -> KVState:
        """Room for the keys and values of `capacity` tokens of one sequence."""
        return KVState(self.spec.kv_heads, self.spec.head_dim, capacity, dtype, self.out.data.device)

    def __call__(self, h: torch.Tensor, batch: Batch, tables: RopeTables) -> torch.Tensor:
        """h [N, hidden] -> [N, hidden]; stores the keys and values of all N tokens in their sequences."""
        a = self.spec
        q, *made = self.project(self.norm(h))
        turn = tables.of(self.rope, h.device)
        k, v = self._keys_and_values(made, turn)
        q = _biased(q, self.q_bias)
        if a.gated:
            q, gate = (contiguous(t) for t in q.view(-1, a.heads, 2, a.head_dim).unbind(2))
            q, gate = q.view(len(h), -1), gate.view(len(h), -1)
        if a.qk_norm == "full":
            q = self.q_norm(q)
        mixed = q = q.view(-1, a.heads, a.head_dim)  # whose memory nobody needs once it is turned
        q = self.rope.apply(q, turn, self.q_norm if a.qk_norm == "head" else None)
        if len(batch.segments) == 1:
            self._mix(batch.segments[0], q, k, v, mixed)
        else:
            for s in batch.segments:
                self._mix(s, q[s.rows], k[s.rows], v[s.rows], mixed[s.rows])
        mixed = mixed.view(-1, a.heads * a.head_dim)
        if a.gated:
            mixed = sigmoid_gate(mixed, gate)
        return _biased(linear(self.out, mixed), self.out_bias)

    def remember(self, h: torch.Tensor, batch: Batch, tables: RopeTables) -> None:
        """As `Mixer` says."""
        made = self.project_remembered(self.norm(h))
        k, v = self._keys_and_values(made, tables.of(self.rope, h.device))
        for s in batch.segments:
            s.state.kv(self.layer).extend(s.start, k[s.rows], v[s.rows])

    def _keys_and_values(
        self, made: Sequence[torch.Tensor], turn: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is remembered of N tokens, [N, kv_heads, D] each, of the products [N, kv_heads * D]."""
        a = self.spec
        k = _biased(made[0], self.k_bias)
        v = k if self.v is None else _biased(made[1], self.v_bias)
        if a.qk_norm == "full":
            k = self.k_norm(k)
        k, v = (t.view(-1, a.kv_heads, a.head_dim) for t in (k, v))
        if a.v_norm:
            v = self.v_norm(v)
        return self.rope.apply(k, turn, self.k_norm if a.qk_norm == "head" else None), v

    def _mix(
        self, s: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixed: torch.Tensor
    ) -> None:
        """The tokens of one sequence: q, mixed [T, heads, D]; k, v [T, kv_heads, D]."""
        a, state = self.spec, s.state.kv(self.layer)
        if self.recordable:
            attend = attend_next if len(q) == 1 else attend_chunk
            attend(q, k, v, state.cache, s.start, a.scale, a.window, self.sinks, mixed)
        else:
            keys, values = state.extend(s.start, k, v)
            _attend(q, keys, values, a, self.sinks, mixed)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Causal attention of the last T positions. q, out [T, heads, D]; keys, values [kv_heads, S, D], S >= T.

    In torch's operations, for a GPU and for heads that the extension does not take.
    """
    tokens, total = len(q), keys.shape[1]
    q = q.to(keys.dtype)

    for begin in range(0, tokens, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, tokens)
        first = total - tokens + begin
        mask = _window_mask(end - begin, first, spec.window, q)
        found = _over_parts(q[begin:end].transpose(0, 1), keys, values, first, spec, mask)
        mixed, _ = joined([part for part, _ in found], [lse for _, lse in found], sinks)
        out[begin:end].copy_(mixed.transpose(0, 1))


def _over_parts(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    spec: AttentionSpec,
    mask: torch.Tensor | None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Attention of queries [H, n, D] at positions first.. over the keys that they see, in one or two parts.

    Only a short past, or a window that ends within it, takes a `mask`: nothing here is as large as the past is long.
    """
    heads, n, dim = queries.shape
    end = first + n

    def stacked(past: slice) -> tuple[torch.Tensor, torch.Tensor]:
        # All queries see all of these keys, so the heads that share a key head can stand as its queries.
        grouped = queries.reshape(keys.shape[0], -1, dim)
        out, lse = attention(grouped, keys[:, past], values[:, past], spec.scale)
        return out.reshape(heads, n, dim), lse.reshape(heads, n)

    if mask is not None:
        near = slice(end - mask.shape[1], end)
        return [attention(queries, keys[:, near], values[:, near], spec.scale, mask=mask)]
    if n == 1:
        return [stacked(slice(0 if spec.window is None else max(0, end - spec.window), end))]
    own = attention(queries, keys[:, first:end], values[:, first:end], spec.scale, causal=True)
    return [stacked(slice(0, first)), own] if first else [own]


def _window_mask(n: int, first: int, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
    """What is added to the scores of `n` queries from position `first` on; None where nothing is.

    0 for the keys that a query sees, up to its own, -inf for the others; the last query ends the keys.
    """
    reach = _masked_reach(n, first, window)
    if reach is None:
        return None
    size = n, min(first + n, n + reach - 1)
    own = size[1] - n
    band = torch.ones(size, dtype=torch.bool, device=like.device).tril_(own).triu_(own - reach + 1)
    return torch.zeros(size, dtype=like.dtype, device=like.device).masked_fill_(~band, -torch.inf)


def _masked_reach(n: int, first: int, window: int | None) -> int | None:
    """How many keys a query of the block sees, where one mask is needed, or is quicker than two parts."""
    end = first + n
    if n == 1:
        return None
    if window is not None and end > window:
        return window
    return end if first > 0 and end <= MASKED_KEYS else None


def _biased(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else add(x, bias)

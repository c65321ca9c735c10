"""Grouped-query attention over the KV caches of the sequences in a batch."""

from functools import partial

import torch

from leanmoe.kernels import add, contiguous, empty, linear, linear_group, sigmoid_gate
from leanmoe.kernels.attention import attend_next, attention, can_attend_next, joined
from leanmoe.models.batch import Batch, Segment
from leanmoe.models.norm import RMSNorm
from leanmoe.models.rope import Rope, RopeTables
from leanmoe.models.spec import MASKED_KEYS, QUERY_BLOCK, AttentionSpec, ModelSpec
from leanmoe.models.state import KVState
from leanmoe.models.trunk import Trunk
from leanmoe.models.workers import Workers

# Multiplications below which handing attention to other threads costs more than it gives.
_PARALLEL_WORK = 1 << 22


class Attention:
    """`out = W_o softmax(scale q k^T + causal mask) v` for one layer, over all of the past or a window of it."""

    def __init__(
        self, trunk: Trunk, spec: ModelSpec, mixer: AttentionSpec, layer: int, workers: Workers
    ) -> None:
        a, prefix = mixer, f"blk.{layer}."
        self.spec, self.layer, self.workers = a, layer, workers
        divisors = ("rope_freqs.weight", a.rope.rotary_dim // 2)
        self.rope = Rope(a.rope, trunk.vector_if_present(*divisors) if a.rope.divided else None)
        q_size, kv_size = a.heads * a.head_dim, a.kv_heads * a.head_dim
        self.q = trunk.weight(prefix + "attn_q.weight", q_size * (2 if a.gated else 1), spec.hidden)
        self.k = trunk.weight(prefix + "attn_k.weight", kv_size, spec.hidden)
        self.v = None if a.shared_kv else trunk.weight(prefix + "attn_v.weight", kv_size, spec.hidden)
        self.project = linear_group([w for w in (self.q, self.k, self.v) if w is not None])
        self.out = trunk.weight(prefix + "attn_output.weight", spec.hidden, q_size)
        self.q_bias = None if a.gated else trunk.vector_if_present(prefix + "attn_q.bias", q_size)
        self.k_bias = trunk.vector_if_present(prefix + "attn_k.bias", kv_size)
        self.v_bias = trunk.vector_if_present(prefix + "attn_v.bias", kv_size)
        self.out_bias = trunk.vector_if_present(prefix + "attn_output.bias", spec.hidden)
        self.sinks = trunk.vector(prefix + "attn_sinks.weight", a.heads) if a.sinks else None
        self.recordable = can_attend_next(self.out.data.device, a.heads, a.kv_heads, a.head_dim)
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

    def __call__(self, x: torch.Tensor, batch: Batch, tables: RopeTables) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden]; stores the keys and values of all N tokens in their sequences."""
        a = self.spec
        made = self.project(x)
        q, k = _biased(made[0], self.q_bias), _biased(made[1], self.k_bias)
        v = k if self.v is None else _biased(made[2], self.v_bias)
        if a.gated:
            q, gate = (contiguous(t) for t in q.view(-1, a.heads, 2, a.head_dim).unbind(2))
            q, gate = q.view(len(x), -1), gate.view(len(x), -1)
        if a.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(-1, n, a.head_dim) for t, n in ((q, a.heads), (k, a.kv_heads), (v, a.kv_heads)))
        if a.v_norm:
            v = self.v_norm(v)
        turn = tables.of(self.rope, x.device)
        by_head = a.qk_norm == "head"
        q = self.rope.apply(q, turn, self.q_norm if by_head else None)
        k = self.rope.apply(k, turn, self.k_norm if by_head else None)
        mixed = empty(q.shape) if q.is_cpu else torch.empty_like(q)
        if len(batch.segments) == 1:
            self._mix(batch.segments[0], q, k, v, mixed)
        else:
            for s in batch.segments:
                self._mix(s, q[s.rows], k[s.rows], v[s.rows], mixed[s.rows])
        mixed = mixed.view(-1, a.heads * a.head_dim)
        if a.gated:
            mixed = sigmoid_gate(mixed, gate)
        return _biased(linear(self.out, mixed), self.out_bias)

    def _mix(
        self, s: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixed: torch.Tensor
    ) -> None:
        """The tokens of one sequence: q, mixed [T, heads, D]; k, v [T, kv_heads, D]."""
        a, state = self.spec, s.state.kv(self.layer)
        if len(q) == 1 and self.recordable:
            attend_next(q, k, v, state.cache, s.start, a.scale, a.window, self.sinks, mixed)
        else:
            keys, values = state.extend(s.start, k, v)
            _attend(q, keys, values, a, self.sinks, mixed, self.workers)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    workers: Workers,
) -> None:
    """Causal attention of the last T positions. q, out [T, heads, D]; keys, values [kv_heads, S, D], S >= T.

    Blocks of queries, and key heads, each with the query heads that share it, are divided between threads where
    there is enough to do. How they are divided does not change the bits.
    """
    tokens, heads, dim = q.shape
    kv_heads, total, _ = keys.shape
    share = heads // kv_heads
    q = q.to(keys.dtype)

    def block(begin: int, part: slice, mask: torch.Tensor | None) -> None:
        end = min(begin + QUERY_BLOCK, tokens)
        wide = slice(part.start * share, part.stop * share)
        queries = q[begin:end, wide].transpose(0, 1)
        found = _over_parts(queries, keys[part], values[part], total - tokens + begin, spec, mask)
        outs, sums = [part for part, _ in found], [lse for _, lse in found]
        mixed, _ = joined(outs, sums, None if sinks is None else sinks[wide])
        out[begin:end, wide].copy_(mixed.transpose(0, 1))

    seen = total if spec.window is None else min(total, spec.window + tokens)
    pieces = min(workers.count, kv_heads) if tokens * seen * heads * dim >= _PARALLEL_WORK else 1
    parts = [slice(kv_heads * i // pieces, kv_heads * (i + 1) // pieces) for i in range(pieces)]
    begins = range(0, tokens, QUERY_BLOCK)
    masks = _window_masks(
        [(min(QUERY_BLOCK, tokens - b), total - tokens + b) for b in begins], spec.window, q
    )
    workers.run(
        [
            partial(block, begin, part, mask)
            for begin, mask in zip(begins, masks, strict=True)
            for part in parts
        ]
    )


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


def _window_masks(
    blocks: list[tuple[int, int]], window: int | None, like: torch.Tensor
) -> list[torch.Tensor | None]:
    """For each block of `n` queries from position `first` on, what is added to its scores; None where nothing is.

    0 for the keys that a query sees, up to its own, -inf for the others; the last query ends the keys.
    """
    made: dict[tuple[int, int], torch.Tensor] = {}
    masks: list[torch.Tensor | None] = []
    for n, first in blocks:
        reach = _masked_reach(n, first, window)
        if reach is None:
            masks.append(None)
            continue
        size = n, min(first + n, n + reach - 1)
        if size not in made:
            own = size[1] - n
            band = torch.ones(size, dtype=torch.bool, device=like.device).tril_(own).triu_(own - reach + 1)
            made[size] = torch.zeros(size, dtype=like.dtype, device=like.device).masked_fill_(
                ~band, -torch.inf
            )
        masks.append(made[size])
    return masks


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

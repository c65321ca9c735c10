"""Grouped-query attention over the KV caches of the sequences in a batch."""

from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from leanmoe.kernels import linear
from leanmoe.models.batch import Batch
from leanmoe.models.norm import RMSNorm
from leanmoe.models.rope import Rope, RopeTables
from leanmoe.models.spec import QUERY_BLOCK, AttentionSpec, ModelSpec
from leanmoe.models.state import KVState
from leanmoe.models.trunk import Trunk
from leanmoe.models.workers import Workers

# Multiplications below which handing attention to other threads costs more than it gives.
_PARALLEL_WORK = 1 << 22


class Attention:
    """`out = W_o softmax(scale q k^T + causal mask) v` for one layer."""

    def __init__(
        self, trunk: Trunk, spec: ModelSpec, mixer: AttentionSpec, layer: int, workers: Workers
    ) -> None:
        a, prefix = mixer, f"blk.{layer}."
        self.spec, self.layer, self.workers = a, layer, workers
        self.rope = Rope(a.rope, trunk.vector_if_present("rope_freqs.weight", a.rope.rotary_dim // 2))
        q_size, kv_size = a.heads * a.head_dim, a.kv_heads * a.head_dim
        self.q = trunk.weight(prefix + "attn_q.weight", q_size * (2 if a.gated else 1), spec.hidden)
        self.k = trunk.weight(prefix + "attn_k.weight", kv_size, spec.hidden)
        self.v = trunk.weight(prefix + "attn_v.weight", kv_size, spec.hidden)
        self.out = trunk.weight(prefix + "attn_output.weight", spec.hidden, q_size)
        self.q_bias = None if a.gated else trunk.vector_if_present(prefix + "attn_q.bias", q_size)
        self.k_bias = trunk.vector_if_present(prefix + "attn_k.bias", kv_size)
        self.v_bias = trunk.vector_if_present(prefix + "attn_v.bias", kv_size)
        self.out_bias = trunk.vector_if_present(prefix + "attn_output.bias", spec.hidden)
        if a.qk_norm is not None:
            whole = a.qk_norm == "full"
            self.q_norm = RMSNorm(
                trunk.vector(prefix + "attn_q_norm.weight", q_size if whole else a.head_dim), spec.eps
            )
            self.k_norm = RMSNorm(
                trunk.vector(prefix + "attn_k_norm.weight", kv_size if whole else a.head_dim), spec.eps
            )

    def new_state(self, capacity: int, dtype: torch.dtype) -> KVState:
        """Room for the keys and values of `capacity` tokens of one sequence."""
        return KVState(self.spec.kv_heads, self.spec.head_dim, capacity, dtype, self.out.data.device)

    def __call__(self, x: torch.Tensor, batch: Batch, tables: RopeTables) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden]; stores the keys and values of all N tokens in their sequences."""
        a = self.spec
        q, k, v = (
            _biased(linear(w, x), b)
            for w, b in ((self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias))
        )
        if a.gated:
            q, gate = (t.flatten(1) for t in q.view(-1, a.heads, 2, a.head_dim).unbind(2))
        if a.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(-1, n, a.head_dim) for t, n in ((q, a.heads), (k, a.kv_heads), (v, a.kv_heads)))
        if a.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        turn = tables.of(self.rope, x.device)
        q, k = self.rope.apply(q, turn), self.rope.apply(k, turn)
        mixed = torch.empty_like(q)
        for s in batch.segments:
            keys, values = s.state.kv(self.layer).extend(s.start, k[s.rows], v[s.rows])
            _attend(q[s.rows], keys, values, a.scale, mixed[s.rows], self.workers)
        mixed = mixed.view(-1, a.heads * a.head_dim)
        if a.gated:
            mixed.mul_(gate.sigmoid_())
        return _biased(linear(self.out, mixed), self.out_bias)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    workers: Workers,
) -> None:
    """Causal attention of the last T positions. q, out [T, heads, D]; keys, values [kv_heads, S, D], S >= T.

    Key heads, each with the query heads that share it, are divided between threads where there is enough to do.
    How they are divided does not change the bits.
    """
    tokens, heads, dim = q.shape
    kv_heads, total, _ = keys.shape
    q = q.to(keys.dtype).view(tokens, kv_heads, heads // kv_heads, dim)
    out = out.view(q.shape)

    def one_token(part: slice) -> None:
        # The only query sees every key, so the heads of a group can stand as its queries: no mask.
        mixed = scaled_dot_product_attention(q[:, part], keys[None, part], values[None, part], scale=scale)
        out[:, part].copy_(mixed)

    def block(part: slice, begin: int) -> None:
        end = min(begin + QUERY_BLOCK, tokens)
        seen = total - tokens + end
        mask = torch.ones(end - begin, seen, dtype=torch.bool, device=q.device).tril(seen - (end - begin))
        mixed = scaled_dot_product_attention(
            q[begin:end, part].flatten(1, 2).transpose(0, 1)[None],
            keys[None, part, :seen],
            values[None, part, :seen],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        out[begin:end, part].copy_(mixed[0].transpose(0, 1).view(end - begin, -1, *out.shape[2:]))

    pieces = min(workers.count, kv_heads) if tokens * total * heads * dim >= _PARALLEL_WORK else 1
    parts = [slice(kv_heads * i // pieces, kv_heads * (i + 1) // pieces) for i in range(pieces)]
    if tokens == 1:
        workers.run([partial(one_token, part) for part in parts])
    else:
        workers.run(
            [partial(block, part, begin) for begin in range(0, tokens, QUERY_BLOCK) for part in parts]
        )


def _biased(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x.add_(bias)

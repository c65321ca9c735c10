"""Multi-head latent attention (DeepSeek-AI 2024), absorbed: heads attend to the latents themselves.

A head's key is `W_k c` for the latent c, and q . (W_k c) = (W_k^T q) . c. So W_k moves to the query, W_v to what
was mixed, and one latent with one rotated key is all that a token leaves behind, whatever the number of heads.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from leanmoe.kernels import linear, linear_each
from leanmoe.kernels.attention import attend_chunk, can_attend
from leanmoe.models.batch import Batch
from leanmoe.models.norm import RMSNorm
from leanmoe.models.rope import Rope, RopeTables
from leanmoe.models.spec import QUERY_BLOCK, LatentAttentionSpec, ModelSpec
from leanmoe.models.state import LatentState
from leanmoe.models.trunk import Trunk


class LatentAttention:
    """One layer of it: queries (through their own latent where there is one), one latent, heads' products, output."""

    recordable = False

    def __init__(
        self, trunk: Trunk, spec: ModelSpec, mixer: LatentAttentionSpec, layer: int, norm: RMSNorm
    ) -> None:
        a, prefix = mixer, f"blk.{layer}.attn_"
        self.spec, self.layer, self.norm = a, layer, norm
        self.rope = Rope(a.rope)
        query = a.heads * (a.plain_dim + a.rope.rotary_dim)
        if a.query_latent:
            self.q_down = trunk.weight(prefix + "q_a.weight", a.query_latent, spec.hidden)
            self.q_norm = RMSNorm(trunk.vector(prefix + "q_a_norm.weight", a.query_latent), spec.eps)
            self.q = trunk.weight(prefix + "q_b.weight", query, a.query_latent)
        else:
            self.q = trunk.weight(prefix + "q.weight", query, spec.hidden)
        self.down = trunk.weight(prefix + "kv_a_mqa.weight", a.entry, spec.hidden)
        self.latent_norm = RMSNorm(trunk.vector(prefix + "kv_a_norm.weight", a.latent), spec.eps)
        self.to_latent = trunk.stacked(prefix + "k_b.weight", a.heads, a.latent, a.plain_dim)
        self.from_latent = trunk.stacked(prefix + "v_b.weight", a.heads, a.value_dim, a.latent)
        self.out = trunk.weight(prefix + "output.weight", spec.hidden, a.heads * a.value_dim)
        self.at_once = can_attend(self.out.data.device, a.heads, 1, a.entry)

    def new_state(self, capacity: int, dtype: torch.dtype) -> LatentState:
        """Room for the latents and rotated keys of `capacity` tokens of one sequence."""
        return LatentState(self.spec.entry, capacity, dtype, self.out.data.device)

    def __call__(self, h: torch.Tensor, batch: Batch, tables: RopeTables) -> torch.Tensor:
        """h [N, hidden] -> [N, hidden]; stores an entry for each of the N tokens in its sequence."""
        a, x, turn = self.spec, self.norm(h), tables.of(self.rope, h.device)
        entries = self._entries(x, turn)
        queries = self._queries(x, turn)
        mixed = torch.empty_like(queries)
        for s in batch.segments:
            # Entries are keys and values. The last numbers of a mix, those of the rotated keys, mean nothing; to
            # compute them is simpler than values of another width than keys.
            own, state = entries[s.rows, None], s.state.latents(self.layer)
            if self.at_once:
                attend_chunk(
                    queries[s.rows], own, own, state.cache, s.start, a.scale, None, None, mixed[s.rows]
                )
            else:
                _attend(queries[s.rows], state.extend(s.start, entries[s.rows]), a.scale, mixed[s.rows])
        values = linear_each(self.from_latent, mixed[..., : a.latent].contiguous())
        return linear(self.out, values.flatten(1))

    def remember(self, h: torch.Tensor, batch: Batch, tables: RopeTables) -> None:
        """As `Mixer` says."""
        entries = self._entries(self.norm(h), tables.of(self.rope, h.device))
        for s in batch.segments:
            s.state.latents(self.layer).extend(s.start, entries[s.rows])

    def _entries(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """What is remembered of N tokens, [N, entry]: the latents, and the keys that were turned."""
        latent, entries = self.spec.latent, linear(self.down, x)
        keys = self.rope.apply(entries[:, None, latent:], turn)[:, 0]
        return torch.cat((self.latent_norm(entries[:, :latent]), keys), dim=-1)

    def _queries(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Each head's query for entries [N, heads, entry]."""
        a = self.spec
        given = self.q_norm(linear(self.q_down, x)) if a.query_latent else x
        q = linear(self.q, given).view(len(x), a.heads, -1)
        plain, rotated = q[..., : a.plain_dim], q[..., a.plain_dim :]
        return torch.cat(
            (linear_each(self.to_latent, plain.contiguous()), self.rope.apply(rotated, turn)), dim=-1
        )


def _attend(queries: torch.Tensor, known: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Causal attention of the last T positions. queries, out [T, heads, E]; known [S, E], S >= T.

    In torch's operations, for a GPU and for entries that the extension does not take.
    """
    tokens, total = len(queries), len(known)
    queries = queries.to(known.dtype)
    for begin in range(0, tokens, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, tokens)
        seen = total - tokens + end
        some = queries[begin:end].transpose(0, 1)[None]
        keys = known[:seen].expand(1, some.shape[1], -1, -1)
        mask = torch.ones(end - begin, seen, dtype=torch.bool, device=out.device).tril(seen - (end - begin))
        mixed = scaled_dot_product_attention(some, keys, keys, attn_mask=mask, scale=scale)
        out[begin:end].copy_(mixed[0].transpose(0, 1))

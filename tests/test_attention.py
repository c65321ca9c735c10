"""Attention over a sequence's keys, in blocks and parts: every query sees what it may, and nothing else."""

import pytest
import torch

from leanmoe.models.attention import _attend
from leanmoe.models.spec import AttentionSpec, RopeSpec

HEADS, KV_HEADS, DIM = 4, 2, 16


def _exact(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    tokens, total = len(q), keys.shape[1]
    k, v = (t.double().repeat_interleave(HEADS // KV_HEADS, dim=0) for t in (keys, values))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * spec.scale
    distance = torch.arange(total - tokens, total)[:, None] - torch.arange(total)
    scores.masked_fill_((distance < 0) | (distance >= (spec.window or total)), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, tokens, 1)), dim=2)
    return (scores.softmax(-1)[..., :total] @ v).transpose(0, 1)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 8, 300, 1500, 4000])
@pytest.mark.parametrize(
    ("tokens", "total"), [(1, 1), (1, 2000), (2, 9), (70, 70), (257, 700), (300, 1100), (600, 2000)]
)
def test_each_query_sees_its_window_of_the_past(
    tokens: int, total: int, window: int | None, with_sinks: bool
) -> None:
    """Blocks of queries, a short or a long past, a window that ends within a block, before it, or never."""
    generator = torch.Generator().manual_seed(total)
    q = torch.randn(tokens, HEADS, DIM, generator=generator)
    keys, values = torch.randn(2, KV_HEADS, total, DIM, generator=generator)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 9.0]) if with_sinks else None
    rope = RopeSpec("neox", DIM, 10000.0)
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, rope, 0.4, window=window, sinks=with_sinks)
    out = torch.full_like(q, torch.nan)
    _attend(q, keys, values, spec, sinks, out)
    torch.testing.assert_close(out.double(), _exact(q, keys, values, spec, sinks), rtol=1e-4, atol=1e-5)

"""Attention in parts: the same as over all keys at once, whatever the parts."""

import itertools

import pytest
import torch

from leanmoe.kernels.attention import attention, joined, plain_attention

SCALE = 0.3


def _inputs(
    heads: int, groups: int, tokens: int, keys: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(heads * 1000 + keys)
    shapes = ((heads, tokens, 32), (groups, keys, 32), (groups, keys, 32))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def _exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    share = q.shape[0] // k.shape[0]
    k, v = (t.double().repeat_interleave(share, dim=0) for t in (k, v))
    scores = q.double() @ k.transpose(1, 2) * SCALE
    if mask is not None:
        scores = scores + mask.double()
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, q.shape[1], 1)
        return torch.cat((scores, column), dim=2).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", [attention, plain_attention])
@pytest.mark.parametrize("kind", ["all", "causal", "window"])
def test_both_forms_are_attention(form, kind: str, dtype: torch.dtype) -> None:
    """A long past, a block among itself, a window: with heads that share keys."""
    tokens, keys = {"all": (5, 2500), "causal": (70, 70), "window": (64, 1300)}[kind]
    q, k, v = _inputs(6, 2, tokens, keys, dtype)
    mask = None
    if kind != "all":
        distance = torch.arange(tokens)[:, None] + keys - tokens - torch.arange(keys)
        hidden = (distance < 0) | (distance >= (40 if kind == "window" else keys))
        mask = torch.zeros(tokens, keys, dtype=dtype).masked_fill(hidden, -torch.inf)
    options = {"causal": True} if kind == "causal" else {"mask": mask}
    out, lse = form(q, k, v, SCALE, **options)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.double(), _exact(q, k, v, mask, None), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sinks", [None, torch.tensor([-3.0, 0.0, 2.0, 30.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("cuts", [(0, 50), (0, 13, 50), (0, 1, 2, 49, 50)], ids=str)
def test_parts_put_together_are_the_whole(cuts: tuple[int, ...], sinks: torch.Tensor | None) -> None:
    """Otherwise a token would weigh differently for where a chunk of the prompt happened to end."""
    q, k, v = _inputs(4, 4, 9, 50, torch.float32)
    parts = [attention(q, k[:, a:b], v[:, a:b], SCALE) for a, b in itertools.pairwise(cuts)]
    out, _ = joined([out for out, _ in parts], [lse for _, lse in parts], sinks)
    torch.testing.assert_close(out.double(), _exact(q, k, v, None, sinks), rtol=1e-5, atol=1e-6)

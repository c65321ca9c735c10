"""Attention of a chunk of a prompt in the extension: exact, whatever the shape, and with the same bits however cut."""

from typing import Any

import pytest
import torch

from kernel_fixtures import using
from leanmoe import kernels
from leanmoe.kernels.attention import attend_chunk
from leanmoe.models.spec import attended_bytes

SCALE = 0.2


def _noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _exact(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """In float64: q [T, heads, D], keys and values [kv_heads, S, D] up to the last token."""
    tokens, total, share = len(q), keys.shape[1], q.shape[1] // keys.shape[0]
    k, v = (t.double().repeat_interleave(share, dim=0) for t in (keys, values))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * SCALE
    distance = torch.arange(total - tokens, total)[:, None] - torch.arange(total)
    scores.masked_fill_((distance < 0) | (distance >= (window or total)), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, tokens, 1)), dim=2)
    return (scores.softmax(-1)[..., :total] @ v).transpose(0, 1)


def _check(
    tokens: int,
    start: int,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    sunk: bool,
    dtype: torch.dtype,
) -> None:
    q = _noise(tokens, heads, dim)
    k, v = _noise(tokens, kv_heads, dim, seed=1), _noise(tokens, kv_heads, dim, seed=2)
    end = start + tokens
    cache = _noise(2, kv_heads, end + 5, dim, seed=3).to(dtype)
    cache[:, :, end:] = torch.nan
    before, sinks = cache.clone(), _noise(heads, seed=4) * 3 if sunk else None
    out = torch.full_like(q, torch.nan)
    attend_chunk(q, k, v, cache, start, SCALE, window, sinks, out)
    before[:, :, start:end] = torch.stack((k, v)).transpose(1, 2).to(dtype)
    assert torch.equal(cache.view(torch.int16), before.view(torch.int16))
    wanted = _exact(q, cache[0, :, :end], cache[1, :, :end], window, sinks)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-5, atol=3e-5)


# tokens, position of the first, window: in one block of keys, over its border, over many; a window within a block,
# over a border, longer than the past
PLACES = [
    (1, 0, None),
    (2, 63, None),
    (5, 60, 3),
    (64, 0, None),
    (64, 64, 64),
    (65, 0, 1),
    (130, 7, 70),
    (200, 0, None),
    (200, 131, 100),
    (33, 1000, None),
    (33, 1000, 500),
    (3, 5, 4000),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (8, 2), (8, 1), (16, 1), (5, 1), (6, 2)])
@pytest.mark.parametrize("isa", kernels.available_isas())
def test_every_token_of_a_chunk_sees_what_it_should(
    isa: str, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    """Wherever a chunk lies, with windows and sinks, whatever number of heads share a key head."""
    with using(isa, threads=2):
        for i, (tokens, start, window) in enumerate(PLACES):
            _check(tokens, start, heads, kv_heads, 32, window, i % 2 == 1, dtype)


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 112, 128, 256, 576])
@pytest.mark.parametrize("isa", kernels.available_isas())
def test_heads_of_every_size(isa: str, dim: int) -> None:
    with using(isa, threads=2):
        _check(70, 30, 4, 2, dim, None, False, torch.float16)
        _check(7, 120, 4, 1, dim, 65, True, torch.float32)


@pytest.mark.parametrize("isa", kernels.available_isas())
def test_bits_depend_neither_on_threads_nor_on_where_a_prompt_is_cut(isa: str) -> None:
    """A prompt whose beginning is kept from the last request must continue as if all of it had been computed."""
    tokens, dim = 300, 64
    for heads, kv_heads, window, sinks in ((8, 2, None, None), (3, 1, 90, _noise(3)), (7, 7, 64, None)):
        q = _noise(tokens, heads, dim) * 4
        k, v = _noise(tokens, kv_heads, dim, seed=1), _noise(tokens, kv_heads, dim, seed=2)
        wanted = None
        for threads, cuts in (
            (1, [300]),
            (5, [300]),
            (2, [1, 2, 65, 128, 131, 299, 300]),
            (1, [100, 200, 300]),
        ):
            cache, out = torch.zeros(2, kv_heads, tokens, dim).half(), torch.full_like(q, torch.nan)
            begin = 0
            with using(isa, threads=threads):
                for end in cuts:
                    part = slice(begin, end)
                    attend_chunk(q[part], k[part], v[part], cache, begin, SCALE, window, sinks, out[part])
                    begin = end
            wanted = out if wanted is None else wanted
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("isa", kernels.available_isas())
def test_large_and_equal_scores(isa: str) -> None:
    """Scores that grow with the position, fall, or are all alike: e^score alone would overflow or vanish."""
    tokens, dim = 200, 16
    for slope in (3.0, -3.0, 0.0):
        q, v = torch.ones(tokens, 1, dim), _noise(tokens, 1, dim)
        k = (torch.arange(tokens) * slope)[:, None, None].expand(-1, 1, dim).contiguous()
        cache, out = torch.zeros(2, 1, tokens, dim), torch.empty_like(q)
        with using(isa):
            attend_chunk(q, k, v, cache, 0, SCALE, None, None, out)
        torch.testing.assert_close(
            out.double(), _exact(q, cache[0], cache[1], None, None), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("isa", kernels.available_isas())
def test_keys_that_are_their_values_are_kept_once(isa: str) -> None:
    """As the latents of DeepSeek's attention are."""
    q, entries = _noise(90, 16, 96), _noise(90, 1, 96, seed=1)
    cache, out = torch.full((1, 1, 100, 96), torch.nan).half(), torch.empty(90, 16, 96)
    with using(isa, threads=2):
        for part in (slice(0, 50), slice(50, 90)):
            own = entries[part]
            attend_chunk(q[part], own, own, cache, part.start, SCALE, None, None, out[part])
    known = cache[0, :, :90]
    assert torch.equal(known, entries.half().transpose(0, 1))
    torch.testing.assert_close(out.double(), _exact(q, known, known, None, None), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [16, 128, 576])
def test_what_it_works_in_is_what_the_plan_says(dim: int) -> None:
    """More would break the budget of a machine with many threads."""
    q, k = _noise(800, 8, dim), _noise(800, 1, dim)
    cache = torch.zeros(2, 1, 800, dim).half()
    kernels.release_scratch()
    for threads in (1, 3):
        with using(threads=threads):
            attend_chunk(q, k, k.clone(), cache, 0, SCALE, None, None, torch.empty_like(q))
        assert 0 < kernels.scratch_bytes() <= threads * attended_bytes(dim)
    assert kernels.scratch_bytes() > 2 * attended_bytes(dim)


def test_what_does_not_fit_is_refused() -> None:
    """Before anything is read or written."""
    q, k, v = torch.zeros(3, 4, 16), torch.zeros(3, 2, 16), torch.zeros(3, 2, 16)
    good: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "cache": torch.zeros(2, 2, 5, 16),
        "start": 2,
        "scale": 1.0,
    }
    good |= {"window": None, "sinks": None, "out": torch.empty_like(q)}
    attend_chunk(**good)
    wrong: list[dict[str, Any]] = [
        {"start": 3},
        {"start": -1},
        {"start": 2**62},
        {"window": 0},
        {"q": torch.zeros(2, 4, 16)},
        {"q": torch.zeros(3, 3, 16), "out": torch.zeros(3, 3, 16)},
        {"q": q.double()},
        {"k": torch.zeros(3, 1, 16)},
        {"v": torch.zeros(2, 2, 16)},
        {"v": k},
        {"cache": torch.zeros(1, 2, 5, 16)},
        {"cache": torch.zeros(2, 2, 10, 16)[:, :, ::2]},
        {"cache": torch.zeros(2, 2, 5, 16, dtype=torch.bfloat16)},
        {"sinks": torch.zeros(3)},
        {"out": torch.zeros(3, 4, 32)},
        {"q": q[:0], "k": k[:0], "v": v[:0], "out": q[:0]},
        dict.fromkeys(("q", "out"), torch.zeros(3, 4, 8))
        | {"k": torch.zeros(3, 2, 8), "v": torch.zeros(3, 2, 8), "cache": torch.zeros(2, 2, 5, 8)},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match=r"fit|cache|contiguous|heads"):
            attend_chunk(**{**good, **change})

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


def _close(out: torch.Tensor, wanted: torch.Tensor, isa: str, dtype: torch.dtype, dim: int = 0) -> None:
    """As floats are; with AVX-512 and keys and values as halves, as integers of 16 bits are: for numbers about one."""
    rounded = isa in ("avx512", "amx") and dtype == torch.float16
    tolerance = {"rtol": 0, "atol": 5e-4 + 1.2e-5 * dim} if rounded else {"rtol": 2e-5, "atol": 3e-5}
    torch.testing.assert_close(out.double(), wanted, **tolerance)


def _check(
    isa: str,
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
    _close(out, wanted, isa, dtype, dim)


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
            _check(isa, tokens, start, heads, kv_heads, 32, window, i % 2 == 1, dtype)


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 112, 128, 256, 576])
@pytest.mark.parametrize("isa", kernels.available_isas())
def test_heads_of_every_size(isa: str, dim: int) -> None:
    with using(isa, threads=2):
        _check(isa, 70, 30, 4, 2, dim, None, False, torch.float16)
        _check(isa, 7, 120, 4, 1, dim, 65, True, torch.float32)


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


def _attend(
    isa: str, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """The last tokens of a sequence, q [T, heads, D]; keys and values [S, kv_heads, D] of all of it, kept as halves."""
    past = len(keys) - len(q)
    cache, out = (
        torch.stack((keys, values)).transpose(1, 2).half().contiguous(),
        torch.full_like(q, torch.nan),
    )
    with using(isa, threads=2):
        attend_chunk(
            q, keys[past:].contiguous(), values[past:].contiguous(), cache, past, SCALE, window, None, out
        )
    return out


def _halves_exact(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return _exact(q, keys.half().transpose(0, 1), values.half().transpose(0, 1), None, None)


@pytest.mark.parametrize("keys", [200, 4096])
@pytest.mark.parametrize("kind", ["even", "peaked", "diffuse", "outliers", "offsets", "sink"])
@pytest.mark.parametrize("isa", kernels.available_isas())
def test_products_cost_less_than_keeping_halves_does(isa: str, kind: str, keys: int) -> None:
    """Whatever the data are like: channels far larger than others, a first token that is all weight and no value."""
    dim = 128
    q, k = _noise(48, 4, dim) * 0.4, _noise(keys, 2, dim, seed=1)
    v = _noise(keys, 2, dim, seed=2)
    q *= {"peaked": 8, "diffuse": 0.02, "outliers": 0.1}.get(kind, 1)
    if kind == "outliers":
        k[..., 5:9] *= 50
        v[..., 40:44] *= 50
    elif kind == "offsets":
        k[..., 5:7] += 100
        v[..., 70:72] += 50
    elif kind == "sink":
        q += 0.4
        k[0], v[0] = 1, v[0] * 0.01
    plain = _exact(q, k.transpose(0, 1), v.transpose(0, 1), None, None)
    halves = _halves_exact(q, k, v)
    error, cost = _attend(isa, q, k, v).double() - halves, halves - plain
    assert error.norm() < 0.85 * cost.norm()
    of_row, cost_of_row = error.norm(dim=-1) / halves.norm(dim=-1), cost.norm(dim=-1) / halves.norm(dim=-1)
    assert of_row.max() < 1.3 * cost_of_row.max()


@pytest.mark.parametrize("dim", [16, 80, 128, 576])
@pytest.mark.parametrize("isa", kernels.available_isas())
def test_sums_at_the_limit_of_what_integers_hold(isa: str, dim: int) -> None:
    """A sum that left 32 bits would come back with the wrong sign."""
    signs = torch.where(torch.arange(dim) % 3 == 0, -1.0, 1.0)
    one = torch.zeros(dim)
    one[dim - 1] = 1
    for row, opposite in ((signs, False), (one, False), (signs, True), (one, True)):
        q = (row * 3).expand(70, 2, -1).contiguous()
        k = (row / dim * 7).expand(200, 1, -1).clone()
        if opposite:
            k[::2] *= -1
        v = (signs * 6e4).expand(200, 1, -1).clone()
        for window in (None, 1, 2, 64):
            out = _attend(isa, q, k, v, window)
            torch.testing.assert_close(out, v[:70].expand(-1, 2, -1), rtol=5e-4, atol=0)
        v[::2] *= -1
        torch.testing.assert_close(
            _attend(isa, q, k, v).double() / 6e4, _halves_exact(q, k, v) / 6e4, rtol=0, atol=5e-4
        )


@pytest.mark.parametrize("isa", kernels.available_isas())
def test_zeros_and_numbers_of_every_size(isa: str) -> None:
    """Tokens of a real prompt have rows without anything, and rows a thousand times as large as others."""
    dim = 32
    q, k, v = _noise(80, 2, dim), _noise(150, 1, dim, seed=1), _noise(150, 1, dim, seed=2)
    for each, zeros in ((q, slice(10, 20)), (k, slice(5, 90, 3)), (v, slice(0, 150, 2))):
        some = [t.clone() for t in (q, k, v)]
        some[[each is t for t in (q, k, v)].index(True)][zeros] = 0
        _close(_attend(isa, *some), _halves_exact(*some), isa, torch.float16, dim)
    assert _attend(isa, q, k, v * 0).eq(0).all()
    for by_q, by_k, by_v in (
        (0, 0, 1),
        (1e-30, 1, 1),
        (1e-42, 1, 1),
        (1e4, 1e-4, 1),
        (1e30, 6e-8, 1),
        (1e-4, 1e4, 1e4),
        (1, 1, 1e-4),
    ):
        out, wanted = _attend(isa, q * by_q, k * by_k, v * by_v), _halves_exact(q * by_q, k * by_k, v * by_v)
        assert (out.double() - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("isa", kernels.available_isas())
def test_what_is_not_a_number_stays_visible(isa: str, bad: float) -> None:
    """A fault of the layers before must not become a plausible text."""
    dim = 32
    q, k, v = _noise(150, 2, dim).abs(), _noise(150, 1, dim, seed=1), _noise(150, 1, dim, seed=2)
    good = _attend(isa, q, k, v)
    for at, row in ((0, q[100, 1]), (1, k[100, 0]), (2, v[100, 0])):
        before, row[7] = row[7].item(), bad
        out = _attend(isa, q, k, v)
        row[7] = before
        touched = out[100, 1] if at == 0 else out[100:]
        assert not (touched[..., 7] if at == 2 else touched).isfinite().any()
        assert torch.equal(out[:64], good[:64])
        if at == 0:
            assert torch.equal(out[101:], good[101:])
            assert torch.equal(out[100, 0], good[100, 0])


@pytest.mark.parametrize("isa", kernels.available_isas())
def test_bits_do_not_depend_on_rows_beside(isa: str) -> None:
    """Nor on later tokens in the same block of keys, however large theirs are."""
    q, k, v = _noise(100, 4, 48), _noise(100, 2, 48, seed=1), _noise(100, 2, 48, seed=2)
    out = _attend(isa, q, k, v)
    q[71:], k[71:], v[71:], q[70, 1] = q[71:] * 50, k[71:] * 50, v[71:] * 50, 3
    other = _attend(isa, q, k, v)
    assert torch.equal(out[:70], other[:70])
    assert torch.equal(out[70, [0, 2, 3]], other[70, [0, 2, 3]])
    assert not torch.equal(out[70, 1], other[70, 1])


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
    _close(out, _exact(q, known, known, None, None), isa, torch.float16, 96)


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

"""Between the products: norms, rotary embedding, sums and the attention of one token, in C++ as in torch."""

from typing import Any

import pytest
import torch

from kernel_fixtures import using
from leanmoe import kernels
from leanmoe.kernels import torch_step
from leanmoe.kernels.attention import attend_next, attention, can_attend, joined


def _noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 16, 80, 2048, 5123])
def test_a_norm_is_what_torch_says_however_many_rows(width: int) -> None:
    """A chunk of a prompt and a token of the answer must come out of a layer alike."""
    x, weight = _noise(70, width) * 30, _noise(width, seed=1)
    normed = kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(normed, torch_step.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-6)
    assert torch.equal(kernels.rms_norm(x[41:42], weight, 1e-5)[0], normed[41])
    with using(threads=3):
        assert torch.equal(kernels.rms_norm(x, weight, 1e-5), normed)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("dim", "half"), [(16, 8), (128, 64), (96, 20), (64, 0)])
def test_heads_turn_as_in_torch_however_many_tokens(dim: int, half: int, normed: bool, apart: bool) -> None:
    """A token's place in the text would otherwise change with the chunk that it came in."""
    x, angle = _noise(90, 6, dim), _noise(90, 1, half, seed=1) * 100
    options: dict[str, Any] = {"apart": apart, "norm": _noise(dim, seed=2) if normed else None, "eps": 1e-6}
    turned = kernels.turn_heads(x, angle.cos(), angle.sin(), **options)
    wanted = torch_step.turn_heads(x, angle.cos(), angle.sin(), **options)
    torch.testing.assert_close(turned, wanted, rtol=3e-6, atol=3e-6)
    one = slice(7, 8)
    assert torch.equal(kernels.turn_heads(x[one], angle[one].cos(), angle[one].sin(), **options), turned[one])


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_outputs_are_added_in_the_order_of_their_numbers(tokens: int) -> None:
    rows, weights = _noise(tokens, 8, 1000), _noise(tokens, 8, seed=1)
    ids, onto = _noise(tokens, 128, seed=2).topk(8).indices, _noise(tokens, 1000, seed=3)
    for start in (None, onto):
        found = kernels.weighted_sum(rows, weights, ids, start)
        assert torch.equal(found, torch_step.weighted_sum(rows, weights, ids, start))
    found = kernels.weighted_sum(rows, weights, ids)
    assert torch.equal(found, kernels.weighted_sum(rows, weights, ids, torch.zeros(tokens, 1000)))
    order = ids.argsort(-1)
    sorted_rows, sorted_weights = rows.take_along_dim(order[..., None], 1), weights.gather(1, order)
    first_to_last = torch.arange(8).expand(tokens, 8).contiguous()
    assert torch.equal(found, kernels.weighted_sum(sorted_rows, sorted_weights, first_to_last))
    assert tokens == 1 or not torch.equal(found, kernels.weighted_sum(rows, weights, first_to_last))


@pytest.mark.parametrize("tokens", [1, 3, 90])
def test_sums_and_gates_are_those_of_torch_however_many_rows(tokens: int) -> None:
    x, y, row = _noise(tokens, 1000), _noise(tokens, 1000, seed=1), _noise(1000, seed=2)
    one = slice(tokens - 1, tokens)
    for got, alone, want in (
        (kernels.add(x, y, 0.25), kernels.add(x[one], y[one], 0.25), x + 0.25 * y),
        (kernels.add(x, row), kernels.add(x[one], row), x + row),
        (kernels.scaled(x, 1.7), kernels.scaled(x[one], 1.7), x * 1.7),
        (kernels.sigmoid_gate(x, y), kernels.sigmoid_gate(x[one], y[one]), x * y.sigmoid()),
        (
            kernels.sigmoid_gate(x, y[:, :1].clone()),
            kernels.sigmoid_gate(x[one], y[one, :1].clone()),
            x * y[:, :1].sigmoid(),
        ),
        (kernels.glu(x, y, "silu"), kernels.glu(x[one], y[one], "silu"), torch.nn.functional.silu(x) * y),
        (
            kernels.glu(x, y, "gelu"),
            kernels.glu(x[one], y[one], "gelu"),
            torch.nn.functional.gelu(x, approximate="tanh") * y,
        ),
    ):
        torch.testing.assert_close(got, want, rtol=3e-6, atol=1e-6)
        assert torch.equal(got[one], alone)


def test_sums_that_do_not_fit_are_refused() -> None:
    x = _noise(3, 16)
    for call in (
        lambda: kernels.add(x, x[:2]),
        lambda: kernels.add(x, x[:, :8]),
        lambda: kernels.add(x, x[0, :8].clone()),
        lambda: kernels.scaled(x[0], 2.0),
        lambda: kernels.glu(x, x[:2], "silu"),
        lambda: kernels.sigmoid_gate(x, x[:, :2].clone()),
        lambda: kernels.angles(torch.ones(4), torch.ones(3, dtype=torch.int64), 1.0),
        lambda: kernels.angles(torch.ones(4, dtype=torch.float64), torch.ones(3), 1.0),
    ):
        with pytest.raises(ValueError, match=r"fit|must be|added"):
            call()


@pytest.mark.parametrize("tokens", [1, 3, 2000])
def test_what_a_delta_net_needs_is_what_torch_says_however_many_tokens(tokens: int) -> None:
    beta, alpha = _noise(tokens, 32) * 5, _noise(tokens, 32, seed=1) * 30
    step, rate, x = _noise(32, seed=2), -_noise(32, seed=3).exp(), _noise(tokens, 4, 100, seed=4)
    one = slice(tokens - 1, tokens)
    share, decay = kernels.decays(beta, alpha, step, rate)
    torch.testing.assert_close(share, beta.sigmoid(), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(decay, rate * torch.nn.functional.softplus(alpha + step), rtol=2e-6, atol=1e-7)
    alone = kernels.decays(beta[one], alpha[one], step, rate)
    assert torch.equal(share[one], alone[0])
    assert torch.equal(decay[one], alone[1])
    long = kernels.unit(x, 1e-6, 0.3)
    torch.testing.assert_close(long, 0.3 * x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    assert torch.equal(long[one], kernels.unit(x[one], 1e-6, 0.3))


def test_parts_of_rows_stand_beside_each_other() -> None:
    whole = _noise(7, 3, 40)
    parts = whole.split([8, 20, 12], dim=-1)
    wanted = torch.cat([part.flatten(1) for part in parts], dim=-1)
    assert torch.equal(kernels.columns(parts), wanted)
    assert torch.equal(kernels.columns(parts[1:2]), parts[1].flatten(1))
    with pytest.raises(ValueError, match="beside"):
        kernels.columns([parts[0], parts[1][:5]])


def test_angles_are_exact_far_into_a_text() -> None:
    """A float's position is off by whole turns at a million tokens."""
    positions = torch.tensor([0, 1, 77, 32_000, 1_000_003])
    frequencies = 10_000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    cos, sin = kernels.angles(frequencies, positions, 1.25)
    wanted = torch_step.angles(frequencies, positions, 1.25)
    torch.testing.assert_close((cos, sin), wanted, rtol=2e-7, atol=1e-7)
    alone, _ = kernels.angles(frequencies, positions[3:4], 1.25)
    assert torch.equal(alone[0], cos[3])


@pytest.mark.parametrize("shape", [(5, 8, 2, 16), (3, 4, 2, 8)])
def test_parts_of_heads_are_put_in_one_piece(shape: tuple[int, ...]) -> None:
    both = _noise(*shape)
    for part in both.unbind(2):
        got = kernels.contiguous(part)
        assert got.is_contiguous()
        assert torch.equal(got, part)
    assert kernels.contiguous(both) is both
    assert torch.equal(kernels.contiguous(both[:, 0].transpose(1, 2)), both[:, 0].transpose(1, 2))


@pytest.mark.parametrize("count", [1, 40, 1000, 5000])
def test_the_largest_are_those_of_a_sort(count: int) -> None:
    """Tokens that were not the likeliest would be drawn from. Equals come in order; infinities are numbers too."""
    x = _noise(5000).mul_(20).round_()  # many equals
    x[[17, 3000]] = torch.tensor([-torch.inf, torch.inf])
    values, places = kernels.largest(x, count)
    wanted = x.sort(descending=True, stable=True)
    assert torch.equal(values, wanted.values[:count])
    assert torch.equal(places, wanted.indices[:count])


def test_what_is_no_number_is_not_among_the_largest() -> None:
    x = _noise(500)
    x[::2] = torch.nan
    values, places = kernels.largest(x, 250)
    assert torch.equal(values, x[places])
    assert not values.isnan().any()
    with pytest.raises(ValueError, match="250"):
        kernels.largest(x, 251)


# heads, key heads, dimension
HEADS = [(32, 4, 128), (6, 2, 32), (5, 1, 80), (3, 3, 16), (14, 2, 256), (13, 1, 512)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("isa", kernels.available_isas())
def test_one_token_sees_what_torch_says(
    isa: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Short and long pasts, windows, sinks, and heads that share keys; the token's own key is among them."""
    for length, window, with_sinks in (
        (1, None, False),
        (7, 3, True),
        (1024, None, True),
        (1025, 1, False),
        (3000, None, False),
        (3000, 1500, True),
    ):
        q, k, v = _noise(1, heads, dim), _noise(1, kv_heads, dim, seed=1), _noise(1, kv_heads, dim, seed=2)
        cache = _noise(2, kv_heads, length + 3, dim, seed=3).to(dtype)
        before, sinks = cache.clone(), _noise(heads, seed=4) if with_sinks else None
        out = torch.full_like(q, torch.nan)
        with using(isa, threads=2):
            attend_next(q, k, v, cache, length - 1, 0.2, window, sinks, out)
        before[:, :, length - 1] = torch.cat((k, v)).to(dtype)
        assert torch.equal(cache, before)
        seen = cache[:, :, 0 if window is None else max(0, length - window) : length].float()
        grouped = q.view(kv_heads, -1, dim)
        mixed, lse = attention(grouped, seen[0], seen[1], 0.2)
        whole, _ = joined([mixed.reshape(heads, 1, dim)], [lse.reshape(heads, 1)], sinks)
        torch.testing.assert_close(out[0], whole[:, 0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 2500])
def test_the_bits_of_attention_do_not_depend_on_threads(window: int | None) -> None:
    q, k, v = _noise(1, 8, 64), _noise(1, 2, 64, seed=1), _noise(1, 2, 64, seed=2)
    cache, outs = _noise(2, 2, 9000, 64, seed=3).half(), []
    for threads in (1, 2, 5):
        outs.append(torch.empty_like(q))
        with using(threads=threads):
            attend_next(q, k, v, cache, 8999, 0.1, window, None, outs[-1])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_what_does_not_fit_is_refused() -> None:
    """Before anything is read or written."""
    x, weight, cos = torch.zeros(2, 3, 8), torch.zeros(8), torch.zeros(2, 1, 4)
    with pytest.raises(ValueError, match="norm"):
        kernels.rms_norm(x, torch.zeros(7), 1e-6)
    for bad in (torch.zeros(1, 1, 4), torch.zeros(2, 1, 5)):
        with pytest.raises(ValueError, match="turned"):
            kernels.turn_heads(x, bad, bad, apart=True)
    with pytest.raises(ValueError, match="norm"):
        kernels.turn_heads(x, cos, cos, apart=True, norm=weight[:4])
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="weights"):
        kernels.weighted_sum(x, torch.zeros(2, 2), ids)
    with pytest.raises(ValueError, match="ids"):
        kernels.weighted_sum(x, torch.zeros(2, 3), ids[:, :2].contiguous())
    with pytest.raises(ValueError, match="onto"):
        kernels.weighted_sum(x, torch.zeros(2, 3), ids, torch.zeros(2, 7))
    with pytest.raises(ValueError, match="out"):
        kernels.add(torch.zeros(2, 3), torch.zeros(3), out=torch.zeros(2, 4))
    q, k, cache = torch.zeros(1, 4, 16), torch.zeros(1, 2, 16), torch.zeros(2, 2, 5, 16)
    wrong: list[dict[str, Any]] = [
        {"position": 5},
        {"position": -1},
        {"k": torch.zeros(1, 1, 16)},
        {"q": torch.zeros(2, 4, 16)},
        {"cache": cache[:, :, ::2]},
        {"cache": cache.double()},
        {"sinks": torch.zeros(3)},
        {"out": torch.zeros(1, 4, 32)},
    ]
    good: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": k,
        "cache": cache,
        "position": 4,
        "scale": 1.0,
        "window": None,
    }
    for change in wrong:
        with pytest.raises(ValueError, match=r"fit|cache|contiguous"):
            attend_next(**{**good, "sinks": None, "out": torch.zeros_like(q), **change})


def test_heads_that_one_call_cannot_take_go_another_way() -> None:
    cpu = torch.device("cpu")
    assert can_attend(cpu, 32, 4, 128)
    assert not can_attend(cpu, 32, 4, 72)
    assert not can_attend(cpu, 32, 4, 592)
    assert not can_attend(torch.device("cuda"), 32, 4, 128)

"""The gated delta rule and its convolution: in C++ and in torch what the formula says, token by token."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from kernel_fixtures import using
from leanmoe import kernels
from leanmoe.kernels import torch_delta

SHAPES = [(2, 6, 16, 20, True), (2, 6, 16, 20, False), (4, 4, 32, 96, True), (1, 3, 8, 5, False)]


def _inputs(tokens: int, shape: tuple[int, int, int, int, bool], seed: int = 0) -> dict[str, Any]:
    key_heads, heads, key_dim, value_dim, _ = shape
    g = torch.Generator().manual_seed(seed)

    def unit(*size: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(*size, generator=g), dim=-1)

    steep = torch.arange(heads) % 3  # heads that forget next to nothing, and heads that forget at once
    return {
        "memory": torch.randn(heads, key_dim, value_dim, generator=g),
        "q": unit(tokens, key_heads, key_dim),
        "k": unit(tokens, key_heads, key_dim),
        "v": torch.randn(tokens, heads, value_dim, generator=g),
        "beta": torch.rand(tokens, heads, generator=g),
        "decay": -torch.rand(tokens, heads, generator=g) * torch.tensor([0.01, 1.0, 40.0])[steep],
        "out": torch.empty(tokens, heads, value_dim),
        "grouped": shape[4],
    }


def _by_formula(
    memory: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    out: torch.Tensor,
    *,
    grouped: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory afterwards and what was seen, in float64."""
    heads, key_heads = len(memory), q.shape[1]
    memory, seen = memory.double(), out.double()
    for t in range(len(q)):
        for h in range(heads):
            key = h // (heads // key_heads) if grouped else h % key_heads
            s = memory[h] * decay[t, h].double().exp()
            d = beta[t, h] * (v[t, h] - s.T @ k[t, key].double())
            memory[h] = s + torch.outer(k[t, key].double(), d)
            seen[t, h] = memory[h].T @ q[t, key].double()
    return memory, seen


@pytest.mark.parametrize("tokens", [1, 2, 64, 131])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("isa", [*kernels.available_isas(), "torch"])
def test_memory_and_output_are_what_the_formula_says(
    isa: str, shape: tuple[int, int, int, int, bool], tokens: int
) -> None:
    """A model of this kind would forget, or never learn, what it was told."""
    given = _inputs(tokens, shape)
    memory, seen = _by_formula(**given)
    if isa == "torch":
        torch_delta.delta_rule(**given)
    else:
        with using(isa, threads=2):
            kernels.delta_rule(**given)
    torch.testing.assert_close(given["memory"].double(), memory, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(given["out"].double(), seen, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuts", [(0, 9), (0, 1, 2, 9), (0, 5, 9)])
@pytest.mark.parametrize("taps", [2, 4, 7])
@pytest.mark.parametrize("isa", [*kernels.available_isas(), "torch"])
def test_the_convolution_sees_each_channel_and_the_tokens_before(
    isa: str, taps: int, cuts: tuple[int, ...]
) -> None:
    """Words that belong together stand beside each other; a prompt in chunks must not lose what was before."""
    channels, g = 1300, torch.Generator().manual_seed(1)
    x, recent = torch.randn(9, channels, generator=g), torch.randn(taps - 1, channels, generator=g)
    weight = torch.randn(taps, channels, generator=g)
    window = torch.cat((recent, x)).double()
    sums = torch.stack([(window[t : t + taps] * weight).sum(0) for t in range(9)])
    out = []
    for begin, end in pairwise(cuts):
        if isa == "torch":
            out.append(torch_delta.short_convolution(recent, x[begin:end], weight))
        else:
            with using(isa, threads=3):
                out.append(kernels.short_convolution(recent, x[begin:end], weight))
    torch.testing.assert_close(torch.cat(out).double(), sums * sums.sigmoid(), rtol=1e-5, atol=1e-5)
    assert torch.equal(recent, window[9:].float())


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_depend_neither_on_calls_nor_threads_nor_instructions(
    shape: tuple[int, int, int, int, bool],
) -> None:
    """How a prompt is cut into chunks, and where it runs, would otherwise show in the answer."""
    whole = _inputs(50, shape)
    with using("portable"):
        kernels.delta_rule(**whole)
    for isa in kernels.available_isas():
        parts = _inputs(50, shape)
        with using(isa, threads=3):
            for begin, end in ((0, 1), (1, 30), (30, 50)):
                cut = {
                    name: value if name in ("memory", "grouped") else value[begin:end]
                    for name, value in parts.items()
                }
                kernels.delta_rule(**cut)
        assert torch.equal(parts["memory"], whole["memory"])
        assert torch.equal(parts["out"], whole["out"])


@pytest.mark.parametrize("run", [kernels.delta_rule, torch_delta.delta_rule])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("q", torch.zeros(4, 2, 17)),
        ("k", torch.zeros(3, 2, 16)),
        ("v", torch.zeros(4, 20, 6).transpose(1, 2)),
        ("beta", torch.zeros(4, 5)),
        ("decay", torch.zeros(4, 6, dtype=torch.float64)),
        ("out", torch.zeros(4, 6, 21)),
        ("memory", torch.zeros(5, 16, 20)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(run: Any, name: str, wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="memor" if name == "memory" else name):
        run(**{**_inputs(4, SHAPES[0]), name: wrong})


@pytest.mark.parametrize("run", [kernels.short_convolution, torch_delta.short_convolution])
@pytest.mark.parametrize(
    "sizes", [((2, 8), (4, 8), (4, 8)), ((3, 8), (4, 9), (4, 8)), ((0, 8), (4, 8), (1, 8))]
)
def test_a_convolution_that_does_not_fit_is_refused(run: Any, sizes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="convolution"):
        run(*(torch.zeros(size) for size in sizes))

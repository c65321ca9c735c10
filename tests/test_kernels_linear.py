"""Products with one matrix: what a model computes must be what its file says, on every processor, every time."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_fixtures import GGUF_ONLY_TYPES, PRODUCT_TYPES, exact, expected, random_weight, using
from leanmoe import kernels
from leanmoe.errors import UnsupportedError
from leanmoe.formats.quant_types import BY_NAME
from leanmoe.kernels import Weight, torch_reference

ISAS = kernels.available_isas()


def columns(name: str, blocks: int) -> int:
    """A row length of that many blocks; types without blocks get lengths that are multiples of nothing."""
    block = BY_NAME[name].block
    return block * blocks if block > 1 else 29 * blocks + 1


def inputs(tokens: int, cols: int, rng: np.random.Generator) -> torch.Tensor:
    """Normal values with outliers of varied size, some blocks zero."""
    x = rng.standard_normal((tokens, cols)) * np.exp(rng.standard_normal((tokens, cols)))
    x[:, rng.integers(0, cols) :][:, :40] *= rng.integers(0, 2)
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("name", [*PRODUCT_TYPES, *GGUF_ONLY_TYPES[:1]])
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_a_product_for_each_head_has_the_bits_of_products_by_themselves(name: str, tokens: int) -> None:
    """Heads of latent attention would otherwise take each other's rows, or a prompt differ from its tokens."""
    rng = np.random.default_rng(5)
    heads, rows, cols = 5, 37, columns(name, 2)
    w = random_weight(name, heads * rows, cols, rng)
    x = inputs(tokens * heads, cols, rng).view(tokens, heads, cols)
    got = kernels.linear_each(w, x)
    assert got.shape == (tokens, heads, rows)
    for head, data in enumerate(w.data.chunk(heads)):
        one = Weight(data.clone(), w.qtype, (rows, cols))
        assert torch.equal(got[:, head], kernels.linear(one, x[:, head].contiguous()))
    if name not in GGUF_ONLY_TYPES:
        exactly = torch_reference.linear_each(w, x)
        assert (exactly - got).norm() <= 0.03 * exactly.norm()


@pytest.mark.parametrize("tokens", [0, 1, 2, 19])
@pytest.mark.parametrize("isa", ISAS)
def test_a_group_has_the_bits_of_products_by_themselves(isa: str, tokens: int) -> None:
    """Types with different partners, and layouts, side by side; one without a product goes the slow way."""
    rng = np.random.default_rng(6)
    x = inputs(tokens, 512, rng)
    names = ("Q4_K", "Q6_K", "Q8_0", "F16", "Q4_1", "Q4_K")
    weights = [
        random_weight(name, rows, 512, rng) for name, rows in zip(names, range(30, 320, 50), strict=False)
    ]
    with using(isa, threads=3):
        wide = random_weight("Q4_K", 96, 512, rng)
        weights.append(kernels.arrange(wide, kernels.best_layout(wide.qtype, 96)))
        slow = [*weights, random_weight(GGUF_ONLY_TYPES[0], 16, 512, rng)]
        for group in (weights, slow, weights[:1]):
            got = kernels.linear_group(group)(x)
            assert len(got) == len(group)
            for mine, w in zip(got, group, strict=True):
                assert torch.equal(mine, kernels.linear(w, x))


def test_a_group_that_does_not_fit_is_refused() -> None:
    rng = np.random.default_rng(0)
    one, other = random_weight("F32", 8, 4, rng), random_weight("F32", 8, 5, rng)
    with pytest.raises(ValueError, match="columns"):
        kernels.linear_group([one, other])
    with pytest.raises(ValueError, match="columns"):
        kernels.linear_group([one])(torch.zeros(1, 5))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.linear_group([one])(torch.zeros(4, 1).T.expand(2, 4))


def test_heads_that_do_not_divide_the_rows_are_refused() -> None:
    w = random_weight("F32", 8, 4, np.random.default_rng(0))
    for shape in ((2, 3, 4), (2, 4, 5), (2, 0, 4), (2, 4)):
        with pytest.raises(ValueError, match=r"part|x "):
            kernels.linear_each(w, torch.zeros(shape))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", PRODUCT_TYPES)
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 70), tokens=st.integers(1, 20), blocks=st.integers(1, 11), seed=st.integers(0, 2**32)
)
def test_product_is_the_rounded_inputs_times_the_exact_weights(
    name: str, isa: str, rows: int, tokens: int, blocks: int, seed: int
) -> None:
    """Otherwise the model's answers differ from llama.cpp's on the same file."""
    rng = np.random.default_rng(seed)
    w = random_weight(name, rows, columns(name, blocks), rng)
    x = inputs(tokens, w.shape[1], rng)
    with using(isa):
        got = kernels.linear(w, x).double().numpy()
    want, size = expected(w, x)
    assert got.shape == (tokens, rows)
    assert (np.abs(got - want) <= 1e-5 * size + 1e-30).all()
    unrounded = x.double().numpy() @ exact(w.data, w.qtype, *w.shape).astype(np.float64).T
    norms = np.linalg.norm(x.double().numpy(), axis=1)[:, None] * np.linalg.norm(
        exact(w.data, w.qtype, *w.shape).astype(np.float64), axis=1
    )
    assert (np.abs(got - unrounded) <= 0.03 * norms).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", PRODUCT_TYPES)
def test_bits_do_not_depend_on_the_company_a_token_keeps(name: str, isa: str) -> None:
    """Otherwise the same prompt gives other text when it is chunked, batched or run on more threads."""
    rng = np.random.default_rng(7)
    w = random_weight(name, 83, columns(name, 9), rng)
    x = inputs(21, w.shape[1], rng)
    with using(isa, threads=1):
        alone = torch.cat([kernels.linear(w, row) for row in x.split(1)])
        for tokens in (2, 3, 4, 5, 8, 13, 14, 15, 21):
            assert torch.equal(kernels.linear(w, x[:tokens].contiguous()), alone[:tokens]), tokens
    for threads in (2, 3):
        with using(isa, threads):
            assert torch.equal(kernels.linear(w, x), alone)
    row_bytes = w.data.numel() // 83
    with using(isa):
        part = Weight(w.data[11 * row_bytes : 30 * row_bytes].clone(), w.qtype, (19, w.shape[1]))
        assert torch.equal(kernels.linear(part, x), alone[:, 11:30])


@pytest.mark.parametrize("name", [*GGUF_ONLY_TYPES, "Q1_0", "Q2_0"])
def test_every_other_type_is_multiplied_exactly(name: str) -> None:
    """Files with rarer types must run, slower but right; splitting the tokens must not change bits."""
    rng = np.random.default_rng(1)
    cols = 512
    w = random_weight(name, 9, cols, rng)
    x = inputs(6, cols, rng)
    values = kernels.dequantize(w.data, w.qtype, w.shape).double()
    got = kernels.linear(w, x)
    want, size = x.double() @ values.T, x.double().abs() @ values.abs().T
    assert ((got - want).abs() <= 1e-5 * size).all()
    assert torch.equal(torch.cat([kernels.linear(w, row) for row in x.split(1)]), got)
    ids = torch.tensor([8, 0, 8])
    assert torch.equal(kernels.embed(w, ids).double(), values[ids])
    with pytest.raises(UnsupportedError, match=name):
        torch_reference.linear(w, x)


def test_large_slow_products_are_made_in_parts() -> None:
    """A rare type must not need the whole matrix in float32 at once."""
    rng = np.random.default_rng(2)
    w = random_weight("TQ2_0", 300, 16384, rng)
    x = inputs(2, 16384, rng)
    want = x.double() @ kernels.dequantize(w.data, w.qtype, w.shape).double().T
    torch.testing.assert_close(kernels.linear(w, x).double(), want, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_K", "Q6_K", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_input_spoils_only_its_own_token(name: str, isa: str, bad: float) -> None:
    """One request that overflows must not crash the process or touch another request's text."""
    rng = np.random.default_rng(3)
    w = random_weight(name, 20, 512, rng)
    x = inputs(17, 512, rng)
    x[7, :256] = 0
    x[8] = 0
    with using(isa):
        clean = kernels.linear(w, x)
        x[4, 300] = bad
        spoilt = kernels.linear(w, x)
    assert torch.isfinite(clean).all()
    assert (clean[8] == 0).all()
    assert not torch.isfinite(spoilt[4]).any()
    keep = [t for t in range(17) if t != 4]
    assert torch.equal(spoilt[keep], clean[keep])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "Q5_1", "F16"])
def test_any_bytes_are_safe(name: str, isa: str) -> None:
    """A damaged file may give nonsense but never a crash: all bytes random, scales not finite included."""
    rng = np.random.default_rng(4)
    data = torch.from_numpy(rng.integers(0, 256, 40 * BY_NAME[name].row_bytes(512), dtype=np.uint8))
    with using(isa):
        assert kernels.linear(Weight(data, BY_NAME[name], (40, 512)), inputs(3, 512, rng)).shape == (3, 40)


@pytest.mark.parametrize("name", PRODUCT_TYPES)
def test_torch_reference_agrees_with_gguf(name: str) -> None:
    """A GPU computes with these; they must mean the same bytes."""
    rng = np.random.default_rng(5)
    w = random_weight(name, 12, 512, rng)
    x = inputs(4, 512, rng)
    values = exact(w.data, w.qtype, *w.shape).astype(np.float64)
    want, size = x.double().numpy() @ values.T, np.abs(x.double().numpy()) @ np.abs(values).T
    assert (np.abs(torch_reference.linear(w, x).double().numpy() - want) <= 1e-5 * size).all()
    ids = torch.tensor([3, 3, 11, 0])
    assert (torch_reference.embed(w, ids).numpy() == values[ids.numpy()]).all()


def test_calls_from_several_threads_do_not_mix() -> None:
    """The server computes from more than one Python thread."""
    rng = np.random.default_rng(6)
    w = random_weight("Q4_K", 200, 1024, rng)
    xs = [inputs(t, 1024, rng) for t in (1, 4, 9, 16)]
    want = [kernels.linear(w, x) for x in xs]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(50) if not torch.equal(kernels.linear(w, xs[i]), want[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_scratch_is_kept_and_can_be_given_back() -> None:
    """A steady call allocates nothing; memory beyond the budget is not held."""
    rng = np.random.default_rng(8)
    w = random_weight("Q4_K", 16, 2048, rng)
    x = inputs(32, 2048, rng)
    kernels.linear(w, x)
    held = kernels.scratch_bytes()
    kernels.linear(w, x)
    kernels.linear(w, x[:3].contiguous())
    assert kernels.scratch_bytes() == held >= 32 * 2048
    kernels.release_scratch()
    assert kernels.scratch_bytes() == 0
    assert kernels.linear(w, x).shape == (32, 16)


def test_no_tokens_give_an_empty_result() -> None:
    w = random_weight("Q8_0", 5, 64, np.random.default_rng(0))
    assert kernels.linear(w, torch.empty(0, 64)).shape == (0, 5)
    assert kernels.embed(w, torch.empty(0, dtype=torch.int64)).shape == (0, 64)


def _weight() -> Weight:
    return random_weight("Q4_0", 4, 64, np.random.default_rng(0))


@pytest.mark.parametrize(
    "call",
    [
        lambda w: kernels.linear(w, torch.zeros(2, 32)),
        lambda w: kernels.linear(w, torch.zeros(64)),
        lambda w: kernels.linear(w, torch.zeros(2, 64, dtype=torch.float64)),
        lambda w: kernels.linear(w, torch.zeros(64, 2).T),
        lambda w: kernels.linear(w, torch.zeros(2, 64, device="meta")),
        lambda w: kernels.linear(Weight(w.data[1:], w.qtype, w.shape), torch.zeros(2, 64)),
        lambda w: kernels.linear(Weight(w.data[::2], w.qtype, (2, 64)), torch.zeros(2, 64)),
        lambda w: kernels.linear(Weight(w.data.view(torch.int8), w.qtype, w.shape), torch.zeros(2, 64)),
        lambda w: kernels.linear(Weight(w.data, w.qtype, (8, 32 - 16)), torch.zeros(2, 16)),
        lambda w: kernels.linear(Weight(w.data, w.qtype, (-4, -64)), torch.zeros(2, 64)),
        lambda w: kernels.embed(w, torch.tensor([4])),
        lambda w: kernels.embed(w, torch.tensor([-1])),
        lambda w: kernels.embed(w, torch.tensor([1], dtype=torch.int32)),
        lambda w: torch_reference.embed(w, torch.tensor([4])),
        lambda w: kernels.dequantize(w.data, w.qtype, (4, 32)),
        lambda w: kernels.dequantize(w.data, w.qtype, (16, 16)),
    ],
)
def test_a_call_that_does_not_fit_is_refused(call) -> None:
    """Never a read outside the buffers."""
    with pytest.raises(ValueError, match=r"\w"):
        call(_weight())


GUARDED = """
import ctypes, mmap, sys
import numpy as np, torch
sys.path.insert(0, sys.argv[1])
from kernel_fixtures import PRODUCT_TYPES, random_weight
from leanmoe import kernels
from leanmoe.kernels import Weight

PAGE = mmap.PAGESIZE

def guarded(data):
    pages = mmap.mmap(-1, (len(data) // PAGE + 3) * PAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    end = (len(data) // PAGE + 2) * PAGE
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(whole.data_ptr() + end), ctypes.c_size_t(PAGE), 0) == 0
    whole[end - len(data) : end] = data
    return whole[end - len(data) : end]

rng = np.random.default_rng(0)
for name in PRODUCT_TYPES:
    for cols in (256, 768) + ((32, 288) if kernels.cpu.BY_NAME[name].block < 256 else ()):
        w = random_weight(name, 3, cols, rng)
        w = Weight(guarded(w.data), w.qtype, w.shape)
        x = guarded(torch.randn(9, cols).view(torch.uint8).view(-1)).view(torch.float32).view(9, cols)
        for isa in kernels.available_isas():
            kernels.set_isa(isa)
            kernels.linear(w, x)
        kernels.dequantize(w.data, w.qtype, w.shape)
        kernels.embed(w, torch.tensor([2]))
print("read within bounds")
"""


def test_nothing_is_read_beyond_a_buffer_s_end() -> None:
    """Slots and mapped files end at a page: one byte too far kills the process."""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, here], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "read within bounds\n", done.stderr

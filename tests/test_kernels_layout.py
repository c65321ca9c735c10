"""Sixteen rows interleaved: the order that matrices have in memory where the processor multiplies it faster."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_fixtures import (
    PRODUCT_TYPES,
    expected,
    expert_layout,
    expert_part,
    random_batch,
    random_weight,
    using,
)
from leanmoe import kernels
from leanmoe.errors import UnsupportedError
from leanmoe.formats.quant_types import BY_NAME
from leanmoe.kernels import Weight, torch_reference
from leanmoe.kernels.cpu import ROWS16
from leanmoe.pack.layout import CANONICAL

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q4_K", "Q5_K", "Q6_K"]
ISAS = [isa for isa in kernels.available_isas() if isa in ("avx512", "amx")]
without = pytest.param("", marks=pytest.mark.skip("this processor has no AVX-512 with VNNI"))
with_rows16 = pytest.mark.parametrize("isa", ISAS or [without])


def rearranged(w: Weight) -> Weight:
    return kernels.arrange(Weight(w.data.clone(), w.qtype, w.shape), ROWS16)


def inputs(tokens: int, cols: int, rng: np.random.Generator) -> torch.Tensor:
    x = rng.standard_normal((tokens, cols)) * np.exp(rng.standard_normal((tokens, cols)))
    x[:, rng.integers(0, cols) :][:, :40] *= rng.integers(0, 2)
    return torch.from_numpy(x.astype(np.float32))


@with_rows16
@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=12, deadline=None)
@given(
    strips=st.integers(1, 5), tokens=st.integers(1, 70), blocks=st.integers(1, 11), seed=st.integers(0, 2**32)
)
def test_product_is_the_rounded_inputs_times_the_exact_weights(
    isa: str, name: str, strips: int, tokens: int, blocks: int, seed: int
) -> None:
    """Otherwise the model's answers differ from llama.cpp's on the same file."""
    rng = np.random.default_rng(seed)
    w = random_weight(name, 16 * strips, BY_NAME[name].block * blocks, rng)
    x = inputs(tokens, w.shape[1], rng)
    with using(isa):
        got = kernels.linear(rearranged(w), x).double().numpy()
    want, size = expected(w, x)
    assert (np.abs(got - want) <= 1e-6 * size + 1e-30).all()


@with_rows16
@pytest.mark.parametrize("name", TYPES)
def test_bits_do_not_depend_on_the_company_a_token_or_a_row_keeps(isa: str, name: str) -> None:
    """Otherwise the same prompt gives other text when it is chunked, batched or run on more threads."""
    rng = np.random.default_rng(7)
    w = random_weight(name, 80, BY_NAME[name].block * 9, rng)
    x = inputs(67, w.shape[1], rng)
    whole = rearranged(w)
    with using(isa, threads=1):
        alone = torch.cat([kernels.linear(whole, row) for row in x.split(1)])
        for tokens in (2, 3, 5, 8, 15, *range(23, 68)):
            assert torch.equal(kernels.linear(whole, x[:tokens].contiguous()), alone[:tokens]), tokens
    for threads in (2, 3):
        with using(isa, threads):
            assert torch.equal(kernels.linear(whole, x), alone)
            each = kernels.linear_each(whole, x[:65].view(13, 5, -1))
            assert torch.equal(
                each.flatten(0, 1), alone[:65].view(65, 5, 16)[range(65), [0, 1, 2, 3, 4] * 13]
            )
    row_bytes = w.data.numel() // 80
    turned = torch.cat([w.data[5 * row_bytes :], w.data[: 5 * row_bytes]])  # every row in another lane
    with using(isa):
        assert torch.equal(
            kernels.linear(rearranged(Weight(turned, w.qtype, w.shape)), x), alone.roll(-5, dims=1)
        )


@with_rows16
@pytest.mark.parametrize(
    ("name", "run", "largest", "bytes_of_weights"),
    [
        ("Q4_K", 32, 2**15 // 15, slice(16, 144)),
        ("Q5_K", 32, 2**15 // 31, slice(16, 176)),
        ("Q6_K", 16, 2**15 // 32, slice(0, 192)),
    ],
)
@pytest.mark.parametrize("extreme", [0, 255])
def test_sums_of_a_run_that_do_not_fit_16_bits(
    isa: str, name: str, run: int, largest: int, bytes_of_weights: slice, extreme: int
) -> None:
    """Such tokens are multiplied otherwise, with those that share their call, and must get the same numbers."""
    rng = np.random.default_rng(9)
    w = random_weight(name, 16, 512, rng)
    w.data.view(-1, BY_NAME[name].block_bytes)[:, bytes_of_weights] = extreme
    sums = [largest + more for more in range(-2, 3)] + [run * 127]
    x = torch.zeros(2 * len(sums), 512)
    for token, wanted in enumerate(sums + sums):
        sign, first = 1 if token < len(sums) else -1, int(rng.integers(512 // run)) * run
        for i in range(run):
            x[token, first + i] = sign * min(127, max(0, wanted - 127 * i))
        x[token, [0, 256]] = x[token, [0, 256]].where(x[token, [0, 256]] != 0, -127.0 * sign)
    ordinary = inputs(20, 512, rng)
    want, size = expected(w, torch.cat([x, ordinary]))
    with using(isa):
        whole = rearranged(w)
        got = kernels.linear(whole, torch.cat([x, ordinary]))
        alone = torch.cat([kernels.linear(whole, row) for row in torch.cat([x, ordinary]).split(1)])
    assert (np.abs(got.double().numpy() - want) <= 1e-6 * size + 1e-30).all()
    assert torch.equal(got, alone)


@with_rows16
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_bits_do_not_depend_on_how_many_tokens_share_a_cache(isa: str, name: str) -> None:
    """Rows so wide that a prompt's tokens are gone through in several runs: each must meet every row of weights."""
    rng = np.random.default_rng(8)
    cols, tokens = 16384, 150
    x, whole = inputs(tokens, cols, rng), rearranged(random_weight(name, 96, cols, rng))
    other = rearranged(random_weight("Q5_K", 32, cols, rng))
    picked = [0, 63, 64, 127, 128, 149]
    with using(isa, threads=2):
        alone = torch.cat([kernels.linear(whole, x[i : i + 1]) for i in picked])
        assert torch.equal(kernels.linear(whole, x)[picked], alone)
        for mine, w in zip(kernels.linear_group([whole, other])(x), (whole, other), strict=True):
            assert torch.equal(mine, kernels.linear(w, x))
        parts = torch.stack([x, x.flip(0)], dim=1)
        each = kernels.linear_each(whole, parts)
        assert torch.equal(each[picked, 0], alone[:, :48])
        assert torch.equal(each[picked, 1], kernels.linear(whole, x).flip(0)[picked][:, 48:])


@with_rows16
@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_K", "Q8_0", "Q4_K")])
def test_an_expert_with_more_tokens_than_one_call_takes(isa: str, types: tuple[str, str, str]) -> None:
    """A long prompt's favourite expert: its last tokens must get what they would get alone."""
    rng = np.random.default_rng(12)
    file = expert_layout(types, 256, 512, ("down_bias",))
    with using(isa, threads=2):
        layout = kernels.arranged(file)
        batch = random_batch(file, [1, 131, 70], 140, rng)
        for slot in batch.slots:
            kernels.Arrangement(layout).apply(slot.numpy().data)
        x = torch.from_numpy(rng.standard_normal((140, 512)).astype(np.float32))
        together = torch.full((202, 512), torch.nan)
        kernels.moe_ffn(layout, batch, x, together)
        zero = torch.zeros(1, dtype=torch.int32)
        for place, expert in ((0, 0), (1, 1), (64, 1), (65, 1), (131, 1), (132, 2), (195, 2), (201, 2)):
            alone = torch.empty(1, 512)
            row = x[batch.token[place] : batch.token[place] + 1].contiguous()
            one = kernels.ExpertBatch([batch.slots[expert]], [1], zero, zero)
            kernels.moe_ffn(layout, one, row, alone)
            assert torch.equal(alone[0], together[batch.dest[place]]), place


@pytest.mark.parametrize("isa", kernels.available_isas())
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("alone", [False, True])
def test_every_row_comes_back_exactly(name: str, isa: str, alone: bool) -> None:
    """A tied embedding is read from the rearranged output matrix: another row's values would be another token."""
    rng = np.random.default_rng(3)
    for blocks in (1, 4, 9):
        w = random_weight(name, 48, BY_NAME[name].block * blocks, rng)
        ids = torch.tensor([47, 0, 16, 15, 31, 0, 33])
        with using(isa):
            moved = kernels.arrange(Weight(w.data.clone(), w.qtype, w.shape), ROWS16, alone=alone)
            assert moved.layout == ROWS16
            assert torch.equal(kernels.embed(moved, ids), kernels.embed(w, ids))
            if blocks > 1:
                assert not torch.equal(moved.data, w.data)


@with_rows16
@pytest.mark.parametrize(
    "types", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "MXFP4", "Q5_K"), ("Q3_K", "Q4_0", "F16")]
)
def test_a_group_of_experts_is_its_products_in_turn(isa: str, types: tuple[str, str, str]) -> None:
    """Gate, up and down may each have the order that suits their type; every expert's output is its own."""
    rng = np.random.default_rng(11)
    file = expert_layout(types, 256, 512, ("down_bias", "gate_scale"))
    with using(isa):
        layout = kernels.arranged(file)
        assert {s.layout for n, s in layout.sections.items() if n in ("gate", "up", "down")} >= {ROWS16}
        batch = random_batch(file, [3, 0, 40, 1], 9, rng)
        x = torch.from_numpy(rng.standard_normal((9, 512)).astype(np.float32) * 0.05)
        want = torch.full((44, 512), torch.nan)
        torch_reference.moe_ffn(file, batch, x, want)
        before = [slot.clone() for slot in batch.slots]
        for slot in batch.slots:
            kernels.Arrangement(layout).apply(slot.numpy().data)
        got = torch.full((44, 512), torch.nan)
        kernels.moe_ffn(layout, batch, x, got)
        assert (got - want).norm() <= 0.03 * want.norm()
        # and bit for bit what single products of the rearranged matrices give
        hidden = [
            kernels.linear(rearranged(w) if layout.sections[n].layout == ROWS16 else w, x)
            for n in ("gate", "up")
            for w in [expert_part(file, before[2], n)]
        ]
        gate = hidden[0] * float(expert_part(file, before[2], "gate_scale").data.view(torch.float32))
        middle = torch_reference.glu(kernels.types.activation("silu"), gate, hidden[1])
        down = expert_part(file, before[2], "down")
        moved = rearranged(down) if layout.sections["down"].layout == ROWS16 else down
        alone = kernels.linear(moved, middle) + expert_part(file, before[2], "down_bias").data.view(
            torch.float32
        )
        mine = slice(3, 43)
        assert (
            got[batch.dest[mine].long()] - alone[batch.token[mine].long()]
        ).abs().max() <= 1e-2 * alone.abs().max()


def test_the_best_layout_is_one_that_can_be_multiplied() -> None:
    """A model that loads must compute, whatever its types and shapes, on every processor."""
    rng = np.random.default_rng(0)
    for isa in kernels.available_isas():
        for name in PRODUCT_TYPES:
            for rows in (1, 16, 40, 48):
                w = random_weight(name, rows, BY_NAME[name].block * 2, rng)
                with using(isa):
                    layout = kernels.best_layout(w.qtype, rows)
                    if rows % 16:
                        assert layout == CANONICAL
                    x = inputs(3, w.shape[1], rng)
                    want = kernels.linear(w, x)
                    got = kernels.linear(kernels.arrange(w, layout), x)
                assert (got - want).norm() <= 1e-5 * want.norm() + 1e-20


def test_what_cannot_be_rearranged_is_refused() -> None:
    """Never half rearranged, never twice, never multiplied as something else."""
    rng = np.random.default_rng(0)
    for name, rows in (("F32", 16), ("Q2_K", 16), ("Q4_K", 15)):
        with pytest.raises(ValueError, match=r"layout|whole blocks"):
            kernels.arrange(random_weight(name, rows, 256, rng), ROWS16)
    moved = rearranged(random_weight("Q4_K", 32, 256, rng))
    with pytest.raises(ValueError, match="rows16 already"):
        kernels.arrange(moved, ROWS16)
    with pytest.raises(UnsupportedError, match="rows16"):
        torch_reference.linear(moved, torch.zeros(1, 256))
    with pytest.raises(ValueError, match="whole blocks"):  # 8 rows for each part
        kernels.linear_each(moved, torch.zeros(1, 4, 256))
    for isa in set(kernels.available_isas()) - set(ISAS):
        with using(isa), pytest.raises(ValueError, match="no product"):
            kernels.linear(moved, torch.zeros(1, 256))

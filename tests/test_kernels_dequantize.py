"""Exact values of every type: embeddings and rare types are read through these."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_fixtures import GGUF_ONLY_TYPES, PRODUCT_TYPES, exact, random_blocks
from leanmoe import kernels
from leanmoe.formats.quant_types import BY_NAME
from leanmoe.kernels import Weight, torch_reference


@pytest.mark.parametrize("name", [*PRODUCT_TYPES, *GGUF_ONLY_TYPES])
@settings(max_examples=5, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_values_are_gguf_s_bit_for_bit(name: str, rows: int, blocks: int, seed: int) -> None:
    """The reference of the format: a difference here is a difference in every answer."""
    qtype = BY_NAME[name]
    cols = qtype.block * blocks
    data = random_blocks(name, rows, cols, np.random.default_rng(seed))
    want = exact(data, qtype, rows, cols)
    got = kernels.dequantize(data, qtype, (rows, cols))
    assert np.array_equal(got.numpy(), want)
    if name in PRODUCT_TYPES:
        assert np.array_equal(torch_reference.dequantize(data, qtype, (rows, cols)).numpy(), want)


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_half_and_bfloat_has_its_value(name: str) -> None:
    """All 65,536 of them, subnormals, infinities and NaNs included."""
    codes = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    data = codes.view(torch.uint8)
    want = codes.view(torch.float16 if name == "F16" else torch.bfloat16).float()
    got = kernels.dequantize(data, BY_NAME[name], (256, 256)).view(-1)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()], want[~want.isnan()])


def test_every_mxfp4_exponent_has_its_value() -> None:
    """The smallest are subnormal in float32, which gguf and ggml keep."""
    data = torch.zeros(256, 17, dtype=torch.uint8)
    data[:, 0] = torch.arange(256)
    data[:, 1:] = 0x1F
    want = exact(data.view(-1), BY_NAME["MXFP4"], 256, 32)
    assert np.array_equal(kernels.dequantize(data.view(-1), BY_NAME["MXFP4"], (256, 32)).numpy(), want)
    assert np.array_equal(
        torch_reference.dequantize(data.view(-1), BY_NAME["MXFP4"], (256, 32)).numpy(), want
    )


def test_one_and_two_bit_types() -> None:
    """gguf has no code for these two, so their formulas are written out here."""
    one = torch.tensor([0x00, 0x40, 0b00000101, *[0] * 15], dtype=torch.uint8)  # d = 2
    values = kernels.dequantize(one, BY_NAME["Q1_0"], (1, 128))[0].tolist()
    assert values == [2.0, -2.0, 2.0, *[-2.0] * 125]
    two = torch.tensor([0x00, 0x40, 0b11100100, *[0] * 15], dtype=torch.uint8)
    values = kernels.dequantize(two, BY_NAME["Q2_0"], (1, 64))[0].tolist()
    assert values == [-2.0, 0.0, 2.0, 4.0, *[-2.0] * 60]


@pytest.mark.parametrize("name", PRODUCT_TYPES)
def test_embedding_is_the_rows_asked_for(name: str) -> None:
    """The first thing every token meets."""
    qtype = BY_NAME[name]
    data = random_blocks(name, 30, 512, np.random.default_rng(1))
    ids = torch.tensor([29, 0, 7, 7])
    want = exact(data, qtype, 30, 512)[ids.numpy()]
    assert np.array_equal(kernels.embed(Weight(data, qtype, (30, 512)), ids).numpy(), want)


def test_shapes_of_any_rank() -> None:
    """Norms are vectors; some tensors have three dimensions."""
    data = random_blocks("F32", 1, 24, np.random.default_rng(2))
    want = data.view(torch.float32)
    assert torch.equal(kernels.dequantize(data, BY_NAME["F32"], (24,)), want)
    assert torch.equal(kernels.dequantize(data, BY_NAME["F32"], (2, 3, 4)), want.view(2, 3, 4))
    assert torch.equal(torch_reference.dequantize(data, BY_NAME["F32"], (2, 3, 4)), want.view(2, 3, 4))

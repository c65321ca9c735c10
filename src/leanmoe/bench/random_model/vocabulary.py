"""A made-up vocabulary of any size that works as real ones do: words are tokens, and any text comes back as it was."""

from collections.abc import Iterator, Sequence
from itertools import islice, product

from leanmoe.formats.gguf_values import Value
from leanmoe.text.bpe import BYTE_CHARACTERS

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_SPACE = "Ġ"  # stands for the byte in byte-level BPE
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NORMAL, _CONTROL = 1, 3


def tokenizer_metadata(size: int, pre: str) -> dict[str, Value]:
    """`tokenizer.*` of a byte-level BPE `vocabulary` of `size` tokens."""
    tokens = vocabulary(size)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_NORMAL] * (size - len(SPECIAL)) + [_CONTROL] * len(SPECIAL),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(size)],
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|pad|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _CHAT_TEMPLATE,
    }


def vocabulary(size: int) -> list[str]:
    """The texts of `size` tokens: bytes, what merges make of them, `SPECIAL`."""
    return [*BYTE_CHARACTERS, *map("".join, _merges(size)), *SPECIAL]


def _merges(size: int) -> Iterator[tuple[str, str]]:
    """Those of a vocabulary of `size` tokens, in the order of their ranks."""
    return islice(_all_merges(), size - 256 - len(SPECIAL))


def _all_merges() -> Iterator[tuple[str, str]]:
    """Pairs of tokens that make another: syllables, then words of one, two, three of them after a space, ..."""
    consonants, vowels = "bdfghjklmnprstvz", "aeiou"
    syllables = ["".join(pair) for pair in product(consonants, vowels)]
    yield from product(consonants, vowels)
    words = [_SPACE]
    while True:
        yield from product(words, syllables)
        words = ["".join(pair) for pair in product(words, syllables)]


def words(tokens: Sequence[str]) -> dict[int, str]:
    """The text of those `tokens` that are words, by id. Said one after the other, each is a token again."""
    return {i: " " + token[1:] for i, token in enumerate(tokens) if token[0] == _SPACE and len(token) > 1}

"""A made-up vocabulary of any size that still works: any text in, the same text out, and a chat template."""

from itertools import chain, islice, product

from leanmoe.formats.gguf_values import Value

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_FIRST = ("Ġ", "t")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NORMAL, _CONTROL = 1, 3


def tokenizer_metadata(size: int, pre: str) -> dict[str, Value]:
    """`tokenizer.*` of a byte-level BPE vocabulary of `size` tokens: bytes, made-up words, and `SPECIAL` at the end.

    Merges lead to none but the first of the words: text becomes bytes. Words are what a random model says.
    """
    tokens = [*_byte_alphabet(), *_words(size - 256 - len(SPECIAL)), *SPECIAL]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_NORMAL] * (size - len(SPECIAL)) + [_CONTROL] * len(SPECIAL),
        "tokenizer.ggml.merges": [" ".join(_FIRST)],  # readers want at least one
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|pad|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _CHAT_TEMPLATE,
    }


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte 0..255 in byte-level BPE (the table published with GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def _words(count: int) -> list[str]:
    """`count` different words, most of two or three syllables, each after a space ("Ġ")."""
    syllables = [a + b for a in "bdfghjklmnprstvz" for b in "aeiou"]
    made = ("Ġ" + "".join(parts) for n in (2, 3) for parts in product(syllables, repeat=n))
    return list(islice(chain(["".join(_FIRST)], made), count))

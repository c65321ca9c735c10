"""A small but complete byte-level BPE vocabulary for tiny models: any text in, the same text out."""

from typing import Any

import gguf

_MERGES = [
    "t h", "th e", "Ġ t", "Ġ the", "i n", "e r", "a n", "o n", "r e", "Ġ a", "Ġ s", "e n",
    "o u", "Ġ w", "Ġ o", "an d", "Ġ and", "in g", "o r", "l l", "Ġ i", "e s", "s t", "Ġ c",
]  # fmt: skip
_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>",
    "<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>", "<|reserved_3|>",
]  # fmt: skip
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTROL, _NORMAL = 3, 1


def byte_alphabet() -> list[str]:
    """The character that stands for each byte 0..255 in byte-level BPE (the table published with GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


_TOKENS = byte_alphabet() + [merge.replace(" ", "") for merge in _MERGES] + _SPECIAL
VOCAB_SIZE = len(_TOKENS)
EOS_ID = _TOKENS.index("<|im_end|>")


def add_tokenizer(writer: gguf.GGUFWriter, pre: str = "qwen2") -> None:
    """Write the vocabulary, merges, special tokens and a ChatML template."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(_TOKENS)
    writer.add_token_types([_NORMAL] * (VOCAB_SIZE - len(_SPECIAL)) + [_CONTROL] * len(_SPECIAL))
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(_TOKENS.index("<|endoftext|>"))
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(_TOKENS.index("<|pad|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHAT_TEMPLATE)


def tokenizer_files(pre: str = "qwen2") -> dict[str, Any]:
    """The same tokenizer as a checkpoint has it: `tokenizer.json` and `tokenizer_config.json`, as JSON values."""
    from leanmoe.text.pretokenizers import PRE_TOKENIZERS

    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in PRE_TOKENIZERS[pre].patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    plain = len(_TOKENS) - len(_SPECIAL)
    added = [
        {"id": plain + i, "content": text, "special": True, "normalized": False, "single_word": False}
        | {"lstrip": False, "rstrip": False}
        for i, text in enumerate(_SPECIAL)
    ]
    model = {
        "type": "BPE",
        "vocab": {text: token for token, text in enumerate(_TOKENS[:plain])},
        "merges": [merge.split(" ") for merge in _MERGES],
        "ignore_merges": PRE_TOKENIZERS[pre].ignore_merges,
    }
    document = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": model,
    }
    settings = {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": {"content": "<|pad|>"},
        "chat_template": _CHAT_TEMPLATE,
    }
    return {"tokenizer.json": document, "tokenizer_config.json": settings}

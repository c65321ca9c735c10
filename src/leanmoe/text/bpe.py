"""Byte-pair encoding by ranked merges, done by the `tokenizers` library: on bytes or on characters."""

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from leanmoe.errors import FormatError
from leanmoe.text.pretokenizers import PreTokenizer
from leanmoe.text.sentencepiece import SPACE


def _byte_characters() -> tuple[str, ...]:
    """The character that stands for each byte in a token's text (GPT-2, Radford et al. 2019).

    Printable Latin-1 bytes stand for themselves; the others, in order, for the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(256))


BYTE_CHARACTERS = _byte_characters()
_BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


class ByteLevelBpe:
    """`tokenizer.ggml.model` = `gpt2`: turns plain text (no special tokens) into ids, token texts into bytes."""

    def __init__(self, ids: Mapping[str, int], merges: Sequence[str], pre: PreTokenizer) -> None:
        """`ids` maps token texts to ids, `merges` lists "left right" in rank order.

        Raises `FormatError` when a merge is malformed or names a token that is not in `ids`.
        """
        self._count = len(ids)
        vocabulary = dict(ids)
        for character in BYTE_CHARACTERS:
            # A byte without a token still separates its neighbours, then comes to nothing: `encode` drops
            # these ids.
            vocabulary.setdefault(character, len(vocabulary))
        self._complete = len(vocabulary) == self._count
        self._tokenizer = tokenizers.Tokenizer(
            models.BPE(vocab=vocabulary, merges=_split_merges(merges, ids), ignore_merges=pre.ignore_merges)
        )
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, which holds no special tokens and no lone surrogates."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if self._complete else [token for token in ids if token < self._count]

    @staticmethod
    def token_bytes(text: str) -> bytes:
        """The bytes that a token's text stands for; a text not in byte characters stands for itself."""
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in text])
        except KeyError:
            return text.encode(errors="replace")


class CharacterBpe:
    """`tokenizer.ggml.model` = `gemma4`: whole lines, with `▁` for spaces; a character without a token as its bytes."""

    def __init__(self, ids: Mapping[str, int], merges: Sequence[str]) -> None:
        """As for `ByteLevelBpe`; the tokens of bytes are spelt `<0xAB>`. Raises `FormatError`."""
        self._tokenizer = tokenizers.Tokenizer(
            models.BPE(vocab=dict(ids), merges=_split_merges(merges, ids), byte_fallback=True)
        )
        self._tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, which holds no special tokens and no lone surrogates."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _split_merges(merges: Sequence[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs in rank order; a pair listed twice keeps its first rank."""
    pairs: dict[tuple[str, str], None] = {}
    for rank, merge in enumerate(merges):
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or not right:
            raise FormatError(
                f"tokenizer.ggml.merges[{rank}] is {merge!r}; wanted two tokens and a space between"
            )
        if left not in ids or right not in ids or left + right not in ids:
            missing = next(text for text in (left, right, left + right) if text not in ids)
            raise FormatError(
                f"tokenizer.ggml.merges[{rank}] is {merge!r}, but {missing!r} is not a token of this file"
            )
        pairs[left, right] = None
    return list(pairs)

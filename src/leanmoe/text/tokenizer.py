"""Text to token ids and back, from the metadata of a GGUF file, with the ids that llama.cpp gives.

Special tokens are found first: each token that the file marks as special, longest first, cuts the text it
occurs in; what is left between them goes to the byte-pair encoder. Control and unknown tokens are found only
with `parse_special`, user-defined ones always. Note what this means for chats: a message that contains
`<|im_end|>` is, once rendered into the prompt and parsed with `parse_special`, the real token, exactly as in
llama.cpp.
"""

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.text.bpe import ByteLevelBpe, CharacterBpe
from leanmoe.text.detokenizer import Detokenizer
from leanmoe.text.pretokenizers import pre_tokenizer
from leanmoe.text.sentencepiece import SPACE, SentencePieceBpe
from leanmoe.text.vocabulary import Kind, Vocabulary, metadata_bool, metadata_strings, read_vocabulary

_log = logging.getLogger(__name__)
_SPECIAL = Kind.CONTROL | Kind.UNKNOWN


class Tokenizer:
    """Immutable once made; safe to share between threads.

    `bos_id` and `eos_id` are None where the file has none; `stop_ids` are all tokens that end generation;
    `vocab_size` counts every token, padding included.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: ByteLevelBpe | CharacterBpe | SentencePieceBpe,
        *,
        add_bos: bool,
        add_eos: bool,
    ) -> None:
        """Use `from_metadata`; this takes parts that are already checked."""
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._add_bos = add_bos
        self._add_eos = add_eos
        self._add_space = False
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.stop_ids = vocabulary.stop_ids
        self.vocab_size = len(vocabulary.tokens)
        self._specials = [(token, vocabulary.tokens[token]) for token in vocabulary.special_order]
        # Not of a method: the cache would keep the tokenizer alive, and be kept by it.
        self._cached_bytes = lru_cache(maxsize=1 << 15)(partial(_token_bytes, vocabulary, encoder))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Builds the tokenizer that `tokenizer.ggml.*` describes.

        Raises `UnsupportedError` for an unknown model or pre-tokenizer and `FormatError` for metadata that
        contradicts itself.
        """
        model = metadata.get("tokenizer.ggml.model")
        if model == "gpt2":
            return cls._byte_level(metadata)
        if model == "llama":
            return cls._sentencepiece(metadata)
        if model == "gemma4":
            return cls._by_character(metadata)
        if model is None:
            raise FormatError("tokenizer.ggml.model is missing: the file has no tokenizer")
        raise UnsupportedError(
            f"tokenizer.ggml.model is {model!r}, which is not supported; known ones: gpt2, llama, gemma4"
        )

    @classmethod
    def _byte_level(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        name = metadata.get("tokenizer.ggml.pre")
        if name is None:
            _log.warning("the file does not name its pre-tokenizer (tokenizer.ggml.pre); using 'default'")
            name = "default"
        family = pre_tokenizer(name)
        vocabulary, ids = read_vocabulary(metadata, {})
        merges = metadata_strings(metadata, "tokenizer.ggml.merges")
        return cls(
            vocabulary,
            ByteLevelBpe(ids, merges, family),
            add_bos=_adds(metadata, "bos", family.add_bos, vocabulary.bos_id),
            add_eos=_adds(metadata, "eos", False, vocabulary.eos_id),
        )

    @classmethod
    def _by_character(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        vocabulary, ids = read_vocabulary(metadata, {})
        encoder = CharacterBpe(ids, metadata_strings(metadata, "tokenizer.ggml.merges"))
        # Files say no by mistake; the model was never trained without it, and llama.cpp adds it all the same.
        return cls(vocabulary, encoder, add_bos=vocabulary.bos_id is not None, add_eos=False)

    @classmethod
    def _sentencepiece(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        vocabulary, ids = read_vocabulary(metadata, {"bos": 1, "eos": 2, "unknown": 0})
        tokenizer = cls(
            vocabulary,
            SentencePieceBpe(ids, vocabulary.scores.tolist(), vocabulary.unknown_id or 0),
            add_bos=_adds(metadata, "bos", True, vocabulary.bos_id),
            add_eos=_adds(metadata, "eos", False, vocabulary.eos_id),
        )
        tokenizer._add_space = metadata_bool(metadata, "tokenizer.ggml.add_space_prefix", True)
        return tokenizer

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """The ids of `text`.

        `parse_special`: control tokens written out in the text become those tokens. `add_special`: BOS and
        EOS are added where the file says so. Lone surrogates, which no encoding of text can hold, are taken
        as U+FFFD.
        """
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        if add_special and self._add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        after_special = True
        for part in self._split_special(text, parse_special):
            if isinstance(part, int):
                ids.append(part)
                after_special = True
            else:
                prefix = " " if self._add_space and after_special else ""
                ids.extend(self._encoder.encode(prefix + part))
                after_special = False
        if add_special and self._add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_rendered(self, rendered: str) -> list[int]:
        """The ids of a rendered chat template: `encode`, but a BOS or EOS that it wrote is not repeated."""
        if self._add_bos and self.bos_id is not None:
            rendered = rendered.removeprefix(self.token_text(self.bos_id))
        if self._add_eos and self.eos_id is not None:
            rendered = rendered.removesuffix(self.token_text(self.eos_id))
        return self.encode(rendered)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, continuation: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 come out as U+FFFD.

        `skip_special` leaves out control and unknown tokens. A SentencePiece tokenizer puts a space before
        every text, which is dropped again here unless the ids are the `continuation` of other text.
        """
        detokenizer = self.detokenizer(skip_special=skip_special, continuation=continuation)
        return "".join([detokenizer.push(token) for token in ids]) + detokenizer.flush()

    def detokenizer(self, *, skip_special: bool = True, continuation: bool = True) -> Detokenizer:
        """A stream from ids to text; what it returns in all equals `decode` with the same arguments.

        The defaults are for generated text: it continues its prompt, and control tokens are no part of it.
        """
        read = self._visible_bytes if skip_special else self.token_bytes
        return Detokenizer(read, strip_space=self._add_space and not continuation)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; may be a part of a character, and is empty for padding tokens.

        Raises `IndexError` for an id outside the vocabulary.
        """
        return self._cached_bytes(self._checked(token))

    def token_text(self, token: int) -> str:
        """A token as the vocabulary spells it (`Ġ` or `▁` for a space). Raises `IndexError` for a bad id."""
        return self._vocabulary.tokens[self._checked(token)]

    def is_control(self, token: int) -> bool:
        """Whether a token is a control token, no part of the text. Raises `IndexError` for a bad id."""
        return self._vocabulary.is_kind(self._checked(token), Kind.CONTROL)

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.vocab_size:
            raise IndexError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        return token

    def _visible_bytes(self, token: int) -> bytes:
        return b"" if self._vocabulary.is_kind(self._checked(token), _SPECIAL) else self.token_bytes(token)

    def _split_special(self, text: str, parse_special: bool) -> list[str | int]:
        """Cuts special tokens out of `text`, longest first; pieces of text between them are never empty."""
        parts: list[str | int] = [text] if text else []
        for token, special in self._specials:
            if special not in text or (not parse_special and self._vocabulary.is_kind(token, _SPECIAL)):
                continue
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                first, *rest = part.split(special)
                cut += [first] if first else []
                for piece in rest:
                    cut += [token, piece] if piece else [token]
            parts = cut
        return parts


def _token_bytes(
    vocabulary: Vocabulary, encoder: ByteLevelBpe | CharacterBpe | SentencePieceBpe, token: int
) -> bytes:
    text = vocabulary.tokens[token]
    if vocabulary.is_kind(token, _SPECIAL | Kind.USER_DEFINED):
        return text.encode(errors="replace")
    if vocabulary.is_kind(token, Kind.NORMAL):
        if isinstance(encoder, ByteLevelBpe):
            return encoder.token_bytes(text)
        return text.replace(SPACE, " ").encode(errors="replace")
    if vocabulary.is_kind(token, Kind.BYTE):
        return _named_byte(text)
    return b""


def _adds(metadata: Mapping[str, Any], name: str, default: bool, token: int | None) -> bool:
    adds = metadata_bool(metadata, f"tokenizer.ggml.add_{name}_token", default)
    if adds and token is None:
        _log.warning(
            "the file asks for a %s token before or after each text but does not name one", name.upper()
        )
    return adds and token is not None


def _named_byte(text: str) -> bytes:
    """The byte of a token spelt `<0xAB>`; a byte token spelt otherwise stands for nothing."""
    try:
        return bytes([int(text[3:5], 16)]) if text.startswith("<0x") and len(text) == 6 else b""
    except ValueError:
        return b""

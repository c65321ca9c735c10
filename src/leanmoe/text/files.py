"""Tokenizer and chat template of a model file: its metadata's, in errors that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager

from leanmoe.errors import FormatError, UnsupportedError
from leanmoe.formats.gguf import GGUFFile
from leanmoe.text.chat import ChatTemplate
from leanmoe.text.tokenizer import Tokenizer


def file_tokenizer(gguf: GGUFFile, vocab: int) -> Tokenizer:
    """The tokenizer in the metadata of `gguf`, a model with embeddings of `vocab` tokens.

    Raises `UnsupportedError` for a kind that lean does not know, and `FormatError` if it contradicts itself or has
    another number of tokens.
    """
    with _naming(gguf):
        tokenizer = Tokenizer.from_metadata(gguf.metadata)
    if tokenizer.vocab_size != vocab:
        raise FormatError(
            f"{gguf.path}: the tokenizer has {tokenizer.vocab_size} tokens, but there are embeddings of {vocab}"
        )
    return tokenizer


def file_template(gguf: GGUFFile, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template in the metadata of `gguf`. Raises as `ChatTemplate.from_metadata`."""
    with _naming(gguf):
        return ChatTemplate.from_metadata(gguf.metadata, tokenizer)


@contextmanager
def _naming(gguf: GGUFFile) -> Iterator[None]:
    """Errors about metadata, which know only keys, get the name of the file that has them."""
    try:
        yield
    except (FormatError, UnsupportedError) as error:
        raise type(error)(f"{gguf.path}: {error}") from error

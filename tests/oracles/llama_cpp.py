"""llama.cpp itself as an oracle: the logits of every position, token ids and greedy text from a GGUF."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from oracles.llama_c_api import KeyOverride, Pointer, library

F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]

_KV_TYPES = {"f32": 0, "f16": 1}


class Vocabulary:
    """The tokenizer of a model file as llama.cpp reads it. A context manager; not thread-safe."""

    def __init__(self, path: Path | str, *, pre: str | None = None, vocab_only: bool = True) -> None:
        """Load `path`; with `pre` as if that were its pre-tokenizer. Raises `RuntimeError` when it is refused."""
        self._lib = library()
        self._model = None
        params = self._lib.llama_model_default_params()
        params.n_gpu_layers, params.vocab_only = 0, vocab_only
        overrides = (KeyOverride * 2)()
        if pre is not None:
            overrides[0] = KeyOverride(KeyOverride.TEXT, b"tokenizer.ggml.pre", 0, pre.encode())
            params.kv_overrides = ctypes.cast(overrides, Pointer)
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"{path}: llama.cpp refuses to load this file")
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.n_vocab: int = self._lib.llama_vocab_n_tokens(self._vocab)

    def close(self) -> None:
        """Free the model. May be called twice."""
        if self._model:
            self._lib.llama_model_free(self._model)
        self._model = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tokenize(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Token ids of `text`."""
        data = text.encode()
        room = len(data) + 16
        ids = (ctypes.c_int32 * room)()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), ids, room, add_special, parse_special)
        if count < 0:
            raise RuntimeError(f"llama.cpp needs {-count} places for the ids of {len(data)} bytes of text")
        return list(ids[:count])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; special tokens as their own text."""
        buffer = ctypes.create_string_buffer(512)
        count = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        if count < 0:
            raise RuntimeError(f"the text of token {token} takes {-count} bytes, more than {len(buffer)}")
        return buffer.raw[:count]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")


class LlamaCpp(Vocabulary):
    """A model loaded by llama.cpp on the CPU. A context manager; not thread-safe.

    `kv` is the type of the KV cache ("f16", llama.cpp's default, or "f32"). `flash_attention=None` leaves the
    choice to llama.cpp. With `kv="f32"` and `flash_attention=False` an F32 model is computed without rounding
    any activation, the only setting of which that is true.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        n_ctx: int = 1024,
        threads: int = 1,
        kv: str = "f16",
        flash_attention: bool | None = None,
    ) -> None:
        """Load `path` with room for `n_ctx` tokens. Raises `RuntimeError` when llama.cpp refuses the file."""
        self._context = None
        super().__init__(path, vocab_only=False)
        self._n_batch = min(n_ctx, 512)
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, self._n_batch, self._n_batch
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = _KV_TYPES[kv]
        params.flash_attn_type = -1 if flash_attention is None else int(flash_attention)
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            self.close()
            raise RuntimeError(f"{path}: llama.cpp cannot make a context of {n_ctx} tokens for this file")
        self._n_ctx = n_ctx

    def close(self) -> None:
        """Free the context and the model. May be called twice."""
        if self._context:
            self._lib.llama_free(self._context)
        self._context = None
        super().close()

    def logits(self, tokens: Sequence[int], positions: Sequence[int] | None = None) -> F32Array:
        """Teacher-forced logits `[len(positions), n_vocab]` after each of `positions` (default: all)."""
        wanted = range(len(tokens)) if positions is None else positions
        rows = {position: row for row, position in enumerate(wanted)}
        out = np.empty((len(rows), self.n_vocab), dtype=np.float32)
        self._forget()
        for start in range(0, len(tokens), self._n_batch):
            chunk = tokens[start : start + self._n_batch]
            asked = [i for i in range(len(chunk)) if start + i in rows]
            self._decode(chunk, start, asked)
            for i in asked:
                row = self._lib.llama_get_logits_ith(self._context, i)
                out[rows[start + i]] = np.ctypeslib.as_array(row, shape=(self.n_vocab,))
        return out

    def logprobs(self, tokens: Sequence[int], positions: Sequence[int] | None = None) -> F64Array:
        """As `logits`, normalised: natural logarithms of the probabilities."""
        return log_softmax(self.logits(tokens, positions))

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` greedy tokens after `tokens`; stops before an end-of-generation token."""
        self._forget()
        for start in range(0, len(tokens), self._n_batch):
            chunk = tokens[start : start + self._n_batch]
            self._decode(chunk, start, [len(chunk) - 1])
        last, answer = len(tokens[start:]) - 1, []
        for position in range(len(tokens), len(tokens) + count):
            row = self._lib.llama_get_logits_ith(self._context, last)
            token = int(np.ctypeslib.as_array(row, shape=(self.n_vocab,)).argmax())
            if self._lib.llama_vocab_is_eog(self._vocab, token):
                break
            answer.append(token)
            self._decode([token], position, [0])
            last = 0
        return answer

    def _forget(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _decode(self, tokens: Sequence[int], start: int, asked: Sequence[int]) -> None:
        if start + len(tokens) > self._n_ctx:
            raise ValueError(f"{start + len(tokens)} tokens do not fit in a context of {self._n_ctx}")
        with self._batch(len(tokens)) as batch:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = token, start + i
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 0
            for i in asked:
                batch.logits[i] = 1
            status = self._lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status} for {len(tokens)} tokens at position {start}")

    @contextmanager
    def _batch(self, size: int) -> Iterator[Any]:
        batch = self._lib.llama_batch_init(size, 0, 1)
        try:
            yield batch
        finally:
            self._lib.llama_batch_free(batch)


def log_softmax(logits: npt.NDArray[np.floating[Any]]) -> F64Array:
    """Natural log-probabilities along the last axis, in float64. Input already normalised is unchanged."""
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    normalised: F64Array = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return normalised


def logprobs(path: Path | str, tokens: Sequence[int], positions: Sequence[int] | None = None) -> F64Array:
    """Load, ask once, free: log-probabilities `[len(positions), n_vocab]` of llama.cpp's default settings."""
    with LlamaCpp(path, n_ctx=max(256, len(tokens))) as model:
        return model.logprobs(tokens, positions)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near two sequences of next-token distributions are. KL divergences in nats, the rest fractions."""

    mean_kl: float
    p99_kl: float
    max_kl: float
    top1: float


def kl_and_top1(reference: npt.NDArray[np.floating[Any]], got: npt.NDArray[np.floating[Any]]) -> Agreement:
    """KL(reference || got) and top-1 matches of two `[T, n_vocab]` arrays of logits or log-probabilities."""
    if reference.shape != got.shape:
        raise ValueError(f"the reference has shape {reference.shape}, the other {got.shape}")
    p, q = log_softmax(reference), log_softmax(got)
    kl = (np.exp(p) * (p - q)).sum(axis=-1)
    return Agreement(
        mean_kl=float(kl.mean()),
        p99_kl=float(np.quantile(kl, 0.99)),
        max_kl=float(kl.max()),
        top1=float((p.argmax(axis=-1) == q.argmax(axis=-1)).mean()),
    )


def mean_nll(logits: npt.NDArray[np.floating[Any]], tokens: Sequence[int]) -> float:
    """Mean negative log-likelihood in nats of each of `tokens` after the first; exp of it is the perplexity."""
    picked = log_softmax(logits)[np.arange(len(tokens) - 1), list(tokens[1:])]
    return -float(picked.mean())

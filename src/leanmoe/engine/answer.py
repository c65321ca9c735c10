"""One answer in the making: prompt in, pieces of text out, and the account of what it took."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from leanmoe.engine.sampling import Sampler
from leanmoe.engine.sequence import Sequence, decode, prefill
from leanmoe.errors import UsageError
from leanmoe.experts.stats import CacheStats
from leanmoe.models.decoder import Decoder
from leanmoe.text import StopMatcher, Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """What one answer took. Times in seconds; expert look-ups and reads while the prompt was computed, and after.

    `prompt_tokens` of an answer cancelled within its prompt are those that were computed.
    """

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    prompt_seconds: float
    decode_seconds: float
    prompt_experts: CacheStats = field(repr=False)
    decode_experts: CacheStats = field(repr=False)

    @property
    def read_bytes_per_token(self) -> float:
        """Expert bytes read for each token fed after the prompt; not those that a warm start read meanwhile."""
        fed, experts = self.completion_tokens - 1, self.decode_experts
        return (experts.read_bytes - experts.warm_bytes) / fed if fed > 0 else 0.0

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens computed per second."""
        return (self.prompt_tokens - self.reused_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens generated per second, the first one excepted: its logits came from the prompt."""
        fed = self.completion_tokens - 1
        return fed / self.decode_seconds if fed > 0 and self.decode_seconds else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `finish_reason` is "stop", "length" or "cancelled"; `tokens` includes a stop token."""

    text: str
    tokens: list[int] = field(repr=False)
    finish_reason: str
    usage: Usage


class _Progress:
    """What an answer in the making shares with whoever reads it: the wish to stop, and the outcome."""

    def __init__(self) -> None:
        self.stop = False
        self.tokens = 0
        self.on_prompt: Callable[[int, int], None] = lambda done, total: None
        self.completion: Completion | None = None

    def stopped(self) -> bool:
        return self.stop


class Stream:
    """An answer being made: iterate over it for pieces of text; afterwards `completion` is the whole.

    `close`, leaving a `with` block, or dropping it ends the answer early, with reason "cancelled". Until it has
    ended its model makes no other answer.
    """

    def __init__(self, pieces: Generator[str, None, None], progress: _Progress) -> None:
        self._pieces, self._progress = pieces, progress

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def watch_prompt(self, callback: Callable[[int, int], None]) -> None:
        """Has `callback` told, in the thread that reads the stream, how many tokens of the prompt are computed, and
        of how many: before the first chunk and after each."""
        self._progress.on_prompt = callback

    @property
    def completion(self) -> Completion | None:
        """The whole answer; None while it is being made."""
        return self._progress.completion

    @property
    def tokens(self) -> int:
        """How many tokens the answer has so far."""
        return self._progress.tokens

    def cancel(self) -> None:
        """Ends the answer after the token being computed. May be called from a signal handler or a thread."""
        self._progress.stop = True

    @property
    def cancelled(self) -> bool:
        return self._progress.stop

    def finish(self) -> Completion:
        """Reads the answer to its end and returns the whole."""
        for _ in self:
            pass
        if self.completion is None:
            raise UsageError("the stream was closed before its answer began")
        return self.completion

    def close(self) -> None:
        """Ends the answer now; may be called again."""
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Answer:
    """One answer: prompt in, pieces of text out, and the account of what it took."""

    def __init__(
        self,
        decoder: Decoder,
        sequence: Sequence,
        tokenizer: Tokenizer,
        stats: Callable[[], CacheStats],
        *,
        prompt: list[int],
        reuse: bool,
        chunk: int,
        max_tokens: int | None,
        sampler: Sampler,
        stop: StopMatcher,
        ignore_eos: bool,
    ) -> None:
        self._decoder, self._sequence, self._tokenizer, self._stats = decoder, sequence, tokenizer, stats
        self._prompt, self._reuse, self._chunk, self._max_tokens = prompt, reuse, chunk, max_tokens
        self._sampler, self._stop = sampler, stop
        self._stop_ids = frozenset[int]() if ignore_eos else tokenizer.stop_ids

    def stream(self, alone: AbstractContextManager[None]) -> Stream:
        """Makes the answer as the stream is read, inside `alone`."""
        progress = _Progress()
        return Stream(self._pieces(progress, alone), progress)

    def _pieces(self, progress: _Progress, alone: AbstractContextManager[None]) -> Generator[str, None, None]:
        with alone:
            sequence, before, begun = self._sequence, self._stats(), time.perf_counter()
            if not self._reuse:
                sequence.reset()
            reused = sequence.keep_prefix(self._prompt)
            wanted, told = self._prompt[reused:], progress.on_prompt
            logits = prefill(self._decoder, sequence, wanted, self._chunk, progress.stopped, told)
            prompted, between, in_prompt = time.perf_counter(), self._stats(), len(sequence.tokens)
            text: list[str] = []
            tokens: list[int] = []
            reason = "cancelled"
            try:
                if logits is not None:
                    source = decode(self._decoder, sequence, logits, self._sampler, progress.stopped)
                    reason = yield from self._decode(source, tokens, text, progress)
            finally:
                usage = Usage(
                    prompt_tokens=in_prompt,
                    reused_tokens=reused,
                    completion_tokens=len(tokens),
                    prompt_seconds=prompted - begun,
                    decode_seconds=time.perf_counter() - prompted,
                    prompt_experts=between - before,
                    decode_experts=self._stats() - between,
                )
                progress.completion = Completion("".join(text), tokens, reason, usage)

    def _decode(
        self, source: Iterator[int], tokens: list[int], text: list[str], progress: _Progress
    ) -> Generator[str, None, str]:
        """Turns tokens into text until something ends it; returns the reason."""
        detokenizer = self._tokenizer.detokenizer()
        reason = "length"
        for token in source:
            tokens.append(token)
            progress.tokens = len(tokens)
            if token in self._stop_ids:
                reason = "stop"
                break
            piece, stopped = self._stop.push(detokenizer.push(token))
            if piece:
                text.append(piece)
                yield piece
            if stopped:
                return "stop"
            if len(tokens) == self._max_tokens:
                break
            if progress.stop:
                reason = "cancelled"
                break
        piece, stopped = self._stop.push(detokenizer.flush())
        piece += "" if stopped else self._stop.flush()
        if piece:
            text.append(piece)
            yield piece
        return "stop" if stopped else reason

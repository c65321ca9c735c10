"""`LLM`: a packed model, ready to answer. The public Python API."""

import os
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from numbers import Integral
from operator import index
from pathlib import Path
from threading import Lock, get_ident
from types import TracebackType
from typing import Any, Self, Unpack

import numpy.typing as npt
import torch

from leanmoe.engine.answer import Answer, Completion, Stream
from leanmoe.engine.config import DEFAULT_WARM_SECONDS, EngineConfig
from leanmoe.engine.memory import peak_bytes
from leanmoe.engine.opening import open_model, warm_start
from leanmoe.engine.sampling import Sampler, SamplingOptions, sampling_params
from leanmoe.engine.sequence import Sequence
from leanmoe.errors import UsageError
from leanmoe.experts.policy import Key
from leanmoe.experts.pool import Observer
from leanmoe.experts.stats import CacheStats
from leanmoe.experts.throttle import Predictor, Prefetch, Survey
from leanmoe.experts.trace import RoutingTrace
from leanmoe.models.batch import Batch
from leanmoe.pack.digests import Verify
from leanmoe.text import ChatTemplate, Message, StopMatcher, file_template
from leanmoe.units import format_bytes, parse_bytes


class _AnswerOptions(SamplingOptions, total=False):
    max_tokens: int | None
    stop: str | SequenceOf[str]
    ignore_eos: bool


class CompletionOptions(_AnswerOptions, total=False):
    """Keyword arguments of `LLM.generate` and `LLM.stream`."""

    special: bool


class ChatOptions(_AnswerOptions, total=False):
    """Keyword arguments of `LLM.chat` and `LLM.stream_chat`."""

    template: dict[str, Any]


class LLM:
    """A model in a `.lmpack` directory, held within a memory budget.

    `memory` is the budget of the whole process ("4GiB" or bytes; None takes nine tenths of what is free); the
    other settings are `EngineConfig`'s; `policy`, `prefetch` and `readers` are, unless given, what `lean tune` chose
    for this pack on this machine, if anything. `observers` are told of every routing (`TraceRecorder` is one).
    Experts stay on disk but for those the budget has slots for. One answer is made at a time; a second caller
    waits. Use it as a context manager, or call `close`.

    Raises `BudgetError` if the budget is too small (naming one that works), `FormatError` or
    `ExpertReadError` for a damaged pack, `UnsupportedError` for an architecture lean does not run.
    """

    def __init__(
        self,
        path: str | Path,
        memory: str | int | None = None,
        *,
        cache: str | int | None = None,
        vram: str | int | None = None,
        devices: str | SequenceOf[str] = ("cpu",),
        context: int | None = None,
        kv_type: str = "f16",
        chunk: int | None = None,
        threads: int | None = None,
        readers: int | None = None,
        verify: Verify = "first",
        policy: str | None = None,
        prefetch: Prefetch | None = None,
        prefetch_level: int | None = None,
        predictor: Predictor = "gate",
        warm: float = DEFAULT_WARM_SECONDS,
        learn: bool = False,
        recording: int | None = None,
        record_probabilities: bool = False,
        observers: SequenceOf[Observer] = (),
    ) -> None:
        config = EngineConfig(
            memory=_bytes(memory),
            cache=_bytes(cache),
            vram=_bytes(vram),
            devices=(devices,) if isinstance(devices, str) else tuple(devices),
            context=context,
            kv_type=kv_type,
            chunk=chunk,
            threads=threads,
            readers=readers,
            verify=verify,
            policy=policy,
            prefetch=prefetch,
            prefetch_level=prefetch_level,
            predictor=predictor,
            warm=warm,
            learn=learn,
            recording=recording,
            record_probabilities=record_probabilities,
        )
        opened = open_model(path, config, observers)
        self.pack, self.spec, self.tokenizer = opened.pack, opened.spec, opened.tokenizer
        self.config, self.plan, self.decoder = opened.config, opened.plan, opened.decoder
        self.warming = opened.warming
        """The reads of the warm start that the pack's profile asked for; to wait for, if one wants to."""
        self._opened, self._pool, self._learner = opened, opened.pool, opened.learner
        self._sequence = opened.sequence
        self._template: ChatTemplate | None = None
        self._closed, self._process = False, os.getpid()
        self._lock = Lock()
        self._answering: int | None = None

    def generate(self, prompt: str | SequenceOf[int], **options: Unpack[CompletionOptions]) -> Completion:
        """Continues `prompt` (text, or token ids taken as they are). Options as in `stream`."""
        return self.stream(prompt, **options).finish()

    def stream(
        self,
        prompt: str | SequenceOf[int],
        *,
        max_tokens: int | None = None,
        stop: str | SequenceOf[str] = (),
        ignore_eos: bool = False,
        special: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """Continues `prompt`, handing out text as it is made; never half a character.

        `max_tokens` None goes on to the end of the context. `stop` strings end the text and are not in it;
        `ignore_eos` goes on past the model's own stop tokens. `special` lets the text of special tokens in the
        prompt stand for them. `sampling` as in `SamplingParams`. The sequence starts afresh, so that the same
        call with a seed, or temperature 0, gives the same answer.
        """
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
            raise UsageError(f"the prompt is {type(prompt).__name__}; wanted text or token ids")
        tokens = (
            self.tokenizer.encode(prompt, parse_special=special) if isinstance(prompt, str) else list(prompt)
        )
        return self._stream(tokens, max_tokens, stop, ignore_eos, sampling, reuse=False)

    def chat(self, messages: SequenceOf[Message], **options: Unpack[ChatOptions]) -> Completion:
        """Answers a conversation: messages like {"role": "user", "content": "..."}. Options as in `stream_chat`."""
        return self.stream_chat(messages, **options).finish()

    def stream_chat(
        self,
        messages: SequenceOf[Message],
        *,
        max_tokens: int | None = None,
        stop: str | SequenceOf[str] = (),
        ignore_eos: bool = False,
        template: dict[str, Any] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """Answers a conversation through the model's chat template; `template` holds variables for it.

        Tokens that the conversation shares with the previous one keep their KV state and are not computed again.
        """
        text = self.chat_template().render(messages, **(template or {}))
        tokens = self.tokenizer.encode_rendered(text)
        return self._stream(tokens, max_tokens, stop, ignore_eos, sampling, reuse=True)

    def chat_template(self) -> ChatTemplate:
        """The model's own. Raises `UsageError` if it has none."""
        if self._template is None:
            self._template = file_template(self.pack.trunk, self.tokenizer)
        return self._template

    @property
    def has_chat_template(self) -> bool:
        return "tokenizer.chat_template" in self.pack.trunk.metadata

    def record(self, done: Completion) -> dict[str, Any]:
        """An answer and what it took, as plain values: sizes in bytes, times in seconds."""
        usage = done.usage
        return {
            "text": done.text,
            "tokens": done.tokens,
            "finish_reason": done.finish_reason,
            "prompt_tokens": usage.prompt_tokens,
            "reused_tokens": usage.reused_tokens,
            "completion_tokens": usage.completion_tokens,
            "prompt_seconds": usage.prompt_seconds,
            "decode_seconds": usage.decode_seconds,
            "prompt_tokens_per_second": usage.prompt_rate,
            "decode_tokens_per_second": usage.decode_rate,
            "hit_rate": usage.decode_experts.hit_rate,
            "prompt_read_bytes": usage.prompt_experts.read_bytes,
            "decode_read_bytes": usage.decode_experts.read_bytes,
            "warm_read_bytes": usage.prompt_experts.warm_bytes + usage.decode_experts.warm_bytes,
            "decode_demand_reads": usage.decode_experts.total.misses,
            "stall_seconds": usage.decode_experts.stall_seconds,
            "prefetch": asdict(usage.decode_experts.prefetch),
            "layers": {layer: asdict(stats) for layer, stats in usage.decode_experts.layers.items()},
            "read_bytes_per_token": usage.read_bytes_per_token,
            "model_bytes": self.plan.experts + self.plan.trunk_bytes,
            "residency": self.plan.residency,
            "memory_budget": self.plan.memory,
            "memory_peak": peak_bytes(),
        }

    def logits(self, tokens: SequenceOf[int]) -> torch.Tensor:
        """Logits [T, vocab] float32 after each of T tokens, computed in chunks from an empty sequence.

        They are the caller's and come on top of the budget: 4 T vocab bytes, and as much again for one chunk.
        """
        with self._alone():
            self._sequence.reset()
            state, size = self._sequence.state, self.plan.chunk
            ids = self._checked(tokens)
            state.reserve(len(ids))
            logits = torch.empty(len(ids), self.spec.vocab)
            for i in range(0, len(ids), size):
                part = Batch.of([(state, ids[i : i + size])], all_logits=True)
                logits[i : i + size] = self.decoder.forward(part)
            return logits

    @contextmanager
    def sequence(self) -> Iterator[Sequence]:
        """The model's own sequence, emptied, to be fed by hand (see `engine.sequence`); answers wait meanwhile."""
        with self._alone():
            self._sequence.reset()
            yield self._sequence

    @property
    def stats(self) -> CacheStats:
        """Counts of expert look-ups and reads since the model was opened."""
        return self._pool.stats if self._pool else CacheStats()

    def warm_start(self, hottest: Iterable[Key]) -> list[Future[bool]]:
        """Reads the `hottest` (layer, expert) in this order into free slots, in the background.

        Begun reads end by themselves; after the configured `warm` seconds no more are begun. They give way to
        everything else, so answers may be asked for at once. Each future is True if its expert was read.
        """
        return warm_start(self._pool, self.config, hottest)

    def load_all(self) -> int:
        """Reads experts until every slot has one, and returns how many were read."""
        return 0 if self._pool is None else self._pool.load_all()

    def trace(self) -> RoutingTrace:
        """The routing recorded so far (see `recording`); may be called after `close`, when there is memory for it.

        Raises `UsageError` if nothing was recorded.
        """
        if self._learner is None or not self.config.recording_bytes:
            raise UsageError(f"{self.pack.path}: no routing was recorded")
        return self._learner.recorder.trace()

    @property
    def recording_full(self) -> bool:
        """Whether more was routed than `recording` had room for; the trace then ends before the text does."""
        return self._learner is not None and self._learner.recorder.full

    def heat(self) -> Mapping[int, npt.NDArray[Any]]:
        """How often each expert was picked: for each layer [experts], in the pack's profile and, if learning, since."""
        return {} if self._learner is None else self._learner.heat()

    def resident(self) -> list[Key]:
        """The (layer, expert) whose bytes are in a slot now."""
        return [] if self._pool is None else self._pool.resident()

    def survey_prefetch(self) -> Survey:
        """Has all amounts of reading ahead take turns from now on; needs prefetch "on". Returns what they took."""
        if self._pool is None:
            raise UsageError(f"{self.pack.path}: a model without experts has no use for prefetch")
        return self._pool.survey_prefetch()

    def close(self) -> None:
        """Stops the readers, lets the memory go, and keeps what was learned. May be called twice."""
        first, self._closed = not self._closed, True
        self._opened.close()
        if first and self.config.learn and self._learner is not None and self._process == os.getpid():
            self._learner.keep()

    def __repr__(self) -> str:
        experts = f", {self.plan.residency:.0%} of the experts resident" if self.plan.experts else ""
        held = "closed" if self._closed else f"{format_bytes(self.plan.memory)} of memory{experts}"
        return f"<LLM {str(self.pack.path)!r}: {self.spec.architecture}, {held}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _checked(self, tokens: SequenceOf[int]) -> list[int]:
        try:
            ids = [index(t) for t in tokens]
        except TypeError as error:
            raise UsageError(f"a prompt that is not text must be token ids: {error}") from None
        if not ids:
            raise UsageError("the prompt is empty; give at least one token")
        if (bad := next((t for t in ids if not 0 <= t < self.spec.vocab), None)) is not None:
            raise UsageError(f"token id {bad} is outside the vocabulary (0 to {self.spec.vocab - 1})")
        return ids

    def _stream(
        self,
        tokens: list[int],
        max_tokens: int | None,
        stop: str | SequenceOf[str],
        ignore_eos: bool,
        sampling: SamplingOptions,
        *,
        reuse: bool,
    ) -> Stream:
        params = sampling_params(sampling)
        if max_tokens is not None and (not isinstance(max_tokens, Integral) or max_tokens < 1):
            raise UsageError(f"max_tokens is {max_tokens}; wanted 1 or more")
        ids = self._checked(tokens)
        if len(ids) > self.plan.context:
            raise UsageError(
                f"the prompt has {len(ids)} tokens but the context holds {self.plan.context}; raise --context"
            )
        answer = Answer(
            self.decoder,
            self._sequence,
            self.tokenizer,
            lambda: self.stats,
            prompt=ids,
            reuse=reuse,
            chunk=self.plan.chunk,
            max_tokens=max_tokens,
            sampler=Sampler(params),
            stop=StopMatcher(stop),
            ignore_eos=ignore_eos,
        )
        return answer.stream(self._alone())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Waits for other threads' answers; one that this thread left unfinished is an error, not a deadlock."""
        if self._answering == get_ident():
            raise UsageError(
                "this thread is still streaming an answer of this model; finish or close it first"
            )
        if self._process != os.getpid():
            raise UsageError(
                "this model was opened before a fork, which takes no threads along; open it again here"
            )
        with self._lock:
            if self._closed:
                raise UsageError("this model is closed; open it again")
            self._answering = get_ident()
            try:
                yield
            finally:
                self._answering = None


def _bytes(size: str | int | None) -> int | None:
    return None if size is None else parse_bytes(size)

"""A token's step from a tape: the same bits as without, whatever happens between two tokens."""

import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from leanmoe import LLM, kernels
from leanmoe.errors import ExpertReadError, LeanError
from leanmoe.kernels import Tape, addresses, aside, empty, recording, turn
from leanmoe.models.batch import Batch
from leanmoe.models.state import SequenceState
from leanmoe.pack import open_pack, pack_gguf

TOKENS = Random(3).choices(range(280), k=24)
FAMILIES = [
    "qwen3moe",
    "qwen2moe",
    "qwen35moe",
    "qwen3next",
    "gpt-oss",
    "glm4moe",
    "deepseek2",
    "gemma4",
    "granitemoe",
    "llama",
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Any]) -> Callable[..., Path]:
    made: dict[Path, Path] = {}

    def make(arch: str, quant: str = "Q8_0") -> Path:
        source = tiny_model(arch, quant).path
        if source not in made:
            made[source] = pack_gguf(source, tmp_path_factory.mktemp("packs") / "tiny.lmpack")
        return made[source]

    return make


def _floor(path: Path) -> int:
    manifest = open_pack(path).manifest
    return 2 * manifest.expert_used_count * max(m.layout.file_bytes for m in manifest.layers)


def _state(llm: LLM, capacity: int = 64, dtype: torch.dtype = torch.float16) -> SequenceState:
    return llm.decoder.new_state(capacity, dtype)


def _next(llm: LLM, state: SequenceState, token: int) -> torch.Tensor:
    return llm.decoder.forward(Batch.of([(state, [token])]))


class _Watch(TorchDispatchMode):
    """While a tape records, torch may make views and nothing else: that would be missing from the next token on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fine = func.is_view or str(func).startswith("aten.empty")
        assert recording() is None or fine, (
            f"{func} is torch's, not a kernel: it would be missing on the tape"
        )
        return func(*args, **(kwargs or {}))


def _without(llm: LLM, state: SequenceState, token: int) -> torch.Tensor:
    """The same by a pass that may be cancelled, which is never recorded."""
    return llm.decoder.forward(Batch.of([(state, [token])]), lambda: False)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("arch", FAMILIES)
def test_a_recorded_step_gives_the_bits_of_one_that_is_not(
    arch: str, cached: bool, packed: Callable[..., Path]
) -> None:
    """An answer would else depend on whether its tokens came one by one, and on what was resident."""
    path = packed(arch)
    tiny = {"cache": _floor(path)} if cached and open_pack(path).manifest.layers else {}
    with LLM(path, **tiny) as llm:
        one, two = _state(llm), _state(llm)
        with _Watch():
            first = _next(llm, one, 7)
        assert torch.equal(first, _without(llm, two, 7))
        for token in TOKENS:
            assert torch.equal(_next(llm, one, token), _without(llm, two, token))


def test_sequences_take_turns_on_one_tape(packed: Callable[..., Path]) -> None:
    """One must not read or write the other's keys; one of another size or type has a tape of its own."""
    forms = [(64, torch.float16), (64, torch.float16), (40, torch.float16), (64, torch.float32)]
    with LLM(packed("qwen3moe")) as llm:
        pairs = [(_state(llm, *form), _state(llm, *form)) for form in forms]
        for i, token in enumerate(TOKENS[:12]):
            for j, (one, two) in enumerate(pairs):
                mine = (token + 7 * j) % 280
                assert torch.equal(_next(llm, one, mine), _without(llm, two, mine)), (i, j)


def test_threads_may_decode_side_by_side(packed: Callable[..., Path]) -> None:
    """They share the memory that a tape works in: the second one must go without."""
    with LLM(packed("qwen3moe")) as llm:
        want = [
            torch.cat([_without(llm, state, (t + 9 * i) % 280) for t in TOKENS])
            for i, state in enumerate([_state(llm), _state(llm), _state(llm)])
        ]
        got: dict[int, torch.Tensor] = {}

        def run(i: int) -> None:
            state = _state(llm)
            got[i] = torch.cat([_next(llm, state, (t + 9 * i) % 280) for t in TOKENS])

        threads = [Thread(target=run, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(got[i], want[i]) for i in range(3))


@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_whose_expert_cannot_be_read_may_be_taken_again(
    recorded: bool, packed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk's hiccup costs the token, not the conversation."""
    path = packed("qwen3moe")
    with LLM(path, cache=_floor(path)) as llm:
        one, two = _state(llm), _state(llm)
        if recorded:
            _next(llm, one, 5)
            _without(llm, two, 5)
        pool = llm.decoder.layers[0].moe.pool

        def gone(*_: object) -> None:
            raise ExpertReadError("gone")

        with monkeypatch.context() as patch:
            patch.setattr(pool, "acquire", gone)
            with pytest.raises(ExpertReadError):
                _next(llm, one, 8)
        for token in TOKENS:
            assert torch.equal(_next(llm, one, token), _without(llm, two, token))


def test_experts_found_by_a_recorded_step_are_counted_as_hits(packed: Callable[..., Path]) -> None:
    """`lean run` says at the end how often an expert was there."""
    path = packed("qwen3moe")
    manifest = open_pack(path).manifest
    with LLM(path) as llm:
        llm.load_all()
        state, before = _state(llm), llm.stats
        for token in TOKENS:
            _next(llm, state, token)
        seen = llm.stats - before
        assert set(seen.layers) == {m.layer for m in manifest.layers}
        assert {each.misses for each in seen.layers.values()} == {0}
        assert {each.hits for each in seen.layers.values()} == {len(TOKENS) * manifest.expert_used_count}


def test_what_a_recorded_step_picks_is_learned(packed: Callable[..., Path]) -> None:
    """`lean run` learns from every token, whether its experts are found or fetched."""

    class Picks:
        def __init__(self) -> None:
            self.seen: list[tuple[int, list[int]]] = []

        def record(self, phase: object, layer: int, experts: Any, weights: Any, chances: Any) -> None:
            self.seen.append((layer, experts.ravel().tolist()))

    path, found = packed("qwen3moe"), []
    for sizes in ({}, {"cache": _floor(path)}):
        picks = Picks()
        with LLM(path, observers=[picks], **sizes) as llm:
            if not sizes:
                llm.load_all()
            state = _state(llm)
            for token in TOKENS[:6]:
                _next(llm, state, token)
        found.append(picks.seen)
    assert found[0] == found[1]
    assert len(found[0]) == 6 * len(open_pack(path).manifest.layers)


def test_after_close_a_recorded_step_ends_in_an_error(packed: Callable[..., Path]) -> None:
    """The slots are gone: their memory must not be read."""
    llm = LLM(packed("qwen3moe"))
    state = _state(llm)
    for token in TOKENS[:3]:
        _next(llm, state, token)
    llm.close()
    with pytest.raises(LeanError, match="closed"):
        _next(llm, state, 1)


def _tape(position: torch.Tensor | None = None) -> Tape:
    return Tape(torch.zeros(1, dtype=torch.int64) if position is None else position, [])


def test_the_watch_sees_what_torch_computes() -> None:
    x = torch.ones(1, 16)
    with _Watch(), pytest.raises(AssertionError, match="missing on the tape"), _tape().recording():
        x.mul(2)
    with _Watch(), _tape().recording():
        aside(lambda _: x.mul(2))
        kernels.add(x, x).view(4, 4).t()


def test_calls_and_what_is_done_aside_keep_their_order() -> None:
    x, seen = torch.ones(1, 16), []
    tape = _tape()

    def look(given: object) -> None:
        seen.append((given, float(y[0, 0]), float(y.mul(2)[0, 1])))

    with tape.recording():
        y = kernels.scaled(x, 3.0)
        aside(look, "first")
        z = kernels.add(y, x)
        aside(lambda given: seen.append((given, float(z[0, 0]))), "first")
    x.fill_(2)
    tape.run("second")
    assert seen == [("first", 3, 6), ("first", 4), ("second", 6, 12), ("second", 8)]


def test_what_is_done_already_is_not_done_aside() -> None:
    """So a token whose experts are all there never comes back to the interpreter."""
    done, seen, tape, x = torch.zeros(1, dtype=torch.int64), [], _tape(), torch.ones(1, 16)
    with tape.recording():
        aside(seen.append, 0, done=done)
        y = kernels.scaled(x, 2.0)
        aside(seen.append, 0)
    done.fill_(1)
    x.fill_(5)
    tape.run(1)
    assert seen == [0, 0, 1]
    assert y.eq(10).all()
    done.zero_()
    tape.run(2)
    assert seen == [0, 0, 1, 2, 2]
    aside(seen.append, 3, done=torch.ones(1, dtype=torch.int64))
    assert len(seen) == 5


def test_memory_of_a_layer_is_taken_again_by_the_layer_after_the_next() -> None:
    """A tape's memory is that of two layers, however many there are."""
    tape, x = _tape(), torch.ones(1, 1000)
    with tape.recording():
        for layer in range(50):
            turn()
            for _ in range(30):
                y = kernels.scaled(x, 1.5)
            x = kernels.scaled(y, 1 / 1.5 if layer % 2 else 1.0)
        assert empty((3, 5), torch.int64).shape == (3, 5)
    assert tape.nbytes <= 3 << 20


def test_a_tape_moves_from_sequence_to_sequence() -> None:
    """Attention finds the keys by the address that it was given last."""
    position = torch.zeros(1, dtype=torch.int64)
    q, k, v = (torch.randn(1, 2, 16) for _ in range(3))
    caches = [torch.zeros(2, 2, 8, 16) for _ in range(2)]
    out = torch.empty(1, 2, 16)
    tape = Tape(position, caches[:1])
    arguments = (1.0, None, None, out)
    with tape.recording():
        kernels.attention.attend_next(q, k, v, caches[0], 0, *arguments)
    tape.move(3, addresses(caches[1:]))
    tape.run(None)
    assert torch.equal(caches[0][0, :, 0], k[0])
    assert torch.equal(caches[1][0, :, 3], k[0])
    assert torch.equal(caches[1][1, :, 3], v[0])
    assert not caches[0][:, :, 3].any()
    want = torch.empty(1, 2, 16)
    other = torch.zeros(2, 2, 8, 16)
    kernels.attention.attend_next(q, k, v, other, 3, 1.0, None, None, want)
    assert torch.equal(out, want)


def test_hits_are_counted_once_whoever_looks_and_when(packed: Callable[..., Path]) -> None:
    """`lean serve` shows the counts while a token is computed, and some look after the model is closed."""
    with LLM(packed("qwen3moe")) as llm:
        llm.load_all()
        before, stop = llm.stats, Event()

        def look() -> None:
            while not stop.is_set():
                assert llm.stats.total.hits >= before.total.hits

        def run() -> None:
            state = _state(llm, 512)
            for token in range(400):
                _next(llm, state, token % 280)

        others, runs = [Thread(target=look) for _ in range(2)], [Thread(target=run) for _ in range(2)]
        for thread in others + runs:
            thread.start()
        for thread in runs:
            thread.join()
        stop.set()
        for thread in others:
            thread.join()
    spec = llm.spec
    assert spec.router is not None
    seen = llm.stats - before
    assert seen.total.hits == 2 * 400 * spec.router.top_k * len(spec.moe_layers)


def test_an_interrupted_step_lets_go_of_what_it_had_fetched(packed: Callable[..., Path]) -> None:
    """Ctrl-C would else leave slots pinned, and the next prompt fewer to read into."""
    path = packed("qwen3moe")
    with LLM(path, cache=_floor(path)) as llm:
        state, moe = _state(llm), llm.decoder.layers[0].moe
        assert moe is not None

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        _next(llm, state, 5)
        moe.look_ahead = interrupt  # which is called between fetching and computing
        with suppress(KeyboardInterrupt):
            _next(llm, state, 8)
        moe.look_ahead = None
        gc.collect()  # the frames that the error went through
        (cache,) = moe.pool.caches

        def all_free() -> bool:
            with moe.pool.acquire(moe.layer, range(moe.router.spec.experts)) as groups:
                for _ in groups:
                    pass
            return not any(slot.pins for slot in cache._resident.values())

        # Its reads end first, in their own time; whoever asks next finds what it dropped.
        assert any(all_free() for _ in range(100))

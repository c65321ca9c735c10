"""A model learns its routing while it works: kept at the end, used at the next start, and never in the way."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from leanmoe import LLM
from leanmoe.engine.learning import model_identity
from leanmoe.engine.tuning import PROFILE
from leanmoe.errors import FormatError, UsageError
from leanmoe.experts.policy import Phase
from leanmoe.experts.profile import RoutingProfile
from leanmoe.experts.recall import profile_recall
from leanmoe.pack import pack_gguf

PROMPT = list(range(1, 40))


@pytest.fixture
def path(tmp_path: Path, tiny_model: Callable[..., object]) -> Path:
    return pack_gguf(tiny_model("qwen3moe", "Q4_K").path, tmp_path / "m.lmpack")  # type: ignore[attr-defined]


@pytest.fixture
def learned(path: Path) -> RoutingProfile:
    with LLM(path, context=128, learn=True) as llm:
        llm.generate(PROMPT, max_tokens=9, temperature=0, ignore_eos=True)
        identity = model_identity(llm.decoder, llm.pack.manifest)
    return RoutingProfile.load(path / PROFILE, identity)


def test_what_was_routed_is_in_the_profile_afterwards(path: Path, learned: RoutingProfile) -> None:
    """A profile of something else would warm the cache with the wrong experts."""
    with LLM(path, context=128, recording=1 << 20) as llm:
        llm.generate(PROMPT, max_tokens=9, temperature=0, ignore_eos=True)
    trace = llm.trace()
    assert trace.tokens == {Phase.PREFILL: len(PROMPT), Phase.DECODE: 8}
    for row, layer in enumerate(learned.layers):
        # Of a prompt's tokens, the last layer is only computed for the last, but where routing is recorded.
        known = trace.rows["token"] >= (len(PROMPT) - 1 if layer == max(learned.layers) else 0)
        picked = trace.rows["experts"][known & (trace.rows["layer"] == layer)].ravel()
        assert learned.counts[row].tolist() == np.bincount(picked, minlength=8).tolist()


def test_without_learning_the_pack_is_left_as_it_was(path: Path) -> None:
    with LLM(path, context=128) as llm:
        llm.generate(PROMPT, max_tokens=4)
        with pytest.raises(UsageError, match="recorded"):
            llm.trace()
    assert not (path / PROFILE).exists()


def test_closing_twice_learns_once(path: Path, learned: RoutingProfile) -> None:
    with LLM(path, context=128, learn=True) as llm:
        llm.generate(PROMPT, max_tokens=9, temperature=0, ignore_eos=True)
        llm.close()
    again = RoutingProfile.load(path / PROFILE, learned.identity)
    assert again.counts.sum() == pytest.approx(2 * learned.counts.sum(), rel=1e-2)


def test_the_hottest_experts_are_there_at_the_next_start(path: Path, learned: RoutingProfile) -> None:
    """The point of a profile: the first answer finds its experts, and is the same answer."""
    with LLM(path, context=128, warm=0) as cold:
        want = cold.generate(PROMPT, max_tokens=8, temperature=0).tokens
        assert cold.stats.warm_bytes == 0
    with LLM(path, context=128) as warm:
        assert all(future.result(20) for future in warm.warming)
        assert set(learned.hottest()) <= set(warm.resident())
        assert warm.stats.warm_bytes == warm.stats.read_bytes > 0
        done = warm.generate(PROMPT, max_tokens=8, temperature=0)
        assert done.tokens == want
        assert done.usage.prompt_experts.total.misses == 0


def cut(path: Path, profile: RoutingProfile) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def newer(path: Path, profile: RoutingProfile) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    path.write_bytes(data)


def another_models(path: Path, profile: RoutingProfile) -> None:
    from dataclasses import replace

    prints = tuple(x + 1 for x in profile.identity.fingerprint)
    RoutingProfile(replace(profile.identity, fingerprint=prints)).save(path)


@pytest.mark.parametrize(
    ("spoil", "why"), [(cut, "cut short"), (newer, "version 2"), (another_models, "another model")]
)
def test_a_profile_that_cannot_be_used_is_said_and_left_alone(
    path: Path,
    learned: RoutingProfile,
    spoil: Callable[[Path, RoutingProfile], None],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run goes on without it, and does not destroy what another version may still read."""
    spoil(path / PROFILE, learned)
    before = (path / PROFILE).read_bytes()
    with caplog.at_level(logging.WARNING), LLM(path, context=128, learn=True) as llm:
        assert len(llm.generate(PROMPT, max_tokens=4, ignore_eos=True).tokens) == 4
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2  # not used at the start, not added to at the end
    assert all(why in message and str(path / PROFILE) in message for message in messages)
    assert (path / PROFILE).read_bytes() == before


def test_a_place_that_cannot_be_written_loses_no_answer(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path / f"{PROFILE}.lock").mkdir()
    with caplog.at_level(logging.WARNING), LLM(path, context=128, learn=True) as llm:
        assert llm.generate(PROMPT, max_tokens=4, ignore_eos=True).text is not None
    assert "not kept" in caplog.text


def test_two_processes_lose_nothing_of_each_other(path: Path, learned: RoutingProfile) -> None:
    """`lean chat` in two terminals: both close at once."""
    program = (
        "import sys; from leanmoe import LLM\n"
        "llm = LLM(sys.argv[1], context=128, learn=True)\n"
        "llm.generate(list(range(1, 40)), max_tokens=9, temperature=0, ignore_eos=True)\n"
        "print('ready', flush=True); sys.stdin.readline(); llm.close()"
    )
    command = [sys.executable, "-c", program, str(path)]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for one in both:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in both:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    assert [one.wait(60) for one in both] == [0, 0]
    again = RoutingProfile.load(path / PROFILE, learned.identity)
    assert again.counts.sum() == pytest.approx(3 * learned.counts.sum(), rel=1e-2)


def test_what_is_recorded_has_a_bound_and_says_when_it_is_reached(path: Path) -> None:
    with LLM(path, context=128, recording=2000) as llm:
        llm.generate(PROMPT, max_tokens=20, ignore_eos=True)
        assert llm.recording_full
    assert 0 < llm.trace().rows.nbytes <= 2000


def test_a_fine_tunes_routers_are_told_from_the_models_own(
    path: Path, learned: RoutingProfile, tmp_path: Path, tiny_model: Callable[..., object]
) -> None:
    other = pack_gguf(tiny_model("qwen3moe", "Q4_K", seed=1).path, tmp_path / "o.lmpack")  # type: ignore[attr-defined]
    with LLM(other, context=128) as llm:
        identity = model_identity(llm.decoder, llm.pack.manifest)
    with pytest.raises(FormatError, match="another model"):
        RoutingProfile.load(path / PROFILE, identity)


@pytest.mark.slow
def test_a_profile_of_one_quantisation_predicts_another(demo_gguf: Path, tmp_path: Path) -> None:
    """Who changes from Q8_0 to a smaller file keeps what was learned: recall within a point."""
    from model_fixtures import real_text
    from oracles.unquantise import requantised_copy

    text = real_text(6000)
    middle = len(text) // 2
    recalls = {}
    packs = {
        "own": pack_gguf(demo_gguf, tmp_path / "own.lmpack"),
        "other": pack_gguf(
            requantised_copy(demo_gguf, tmp_path / "q4.gguf", "Q4_0"), tmp_path / "other.lmpack"
        ),
    }
    traces = {}
    for name, pack in packs.items():
        with LLM(pack, context=2048, learn=True, recording=32 << 20) as llm:
            llm.generate(llm.tokenizer.encode(text[:middle]), max_tokens=1)
            identity = model_identity(llm.decoder, llm.pack.manifest)
        with LLM(pack, context=2048, recording=32 << 20) as llm:
            llm.generate(llm.tokenizer.encode(text[middle:]), max_tokens=1)
        traces[name] = llm.trace()
    # What was learned on "own" is read as a profile of "other": the fingerprint lets it.
    for name in packs:
        profile = RoutingProfile.load(packs[name] / PROFILE, identity)
        recalls[name] = profile_recall(profile, traces["other"], [2, 4])
    assert (traces["own"].rows["experts"] != traces["other"].rows["experts"]).any()
    for predictor in recalls["own"]:
        for mine, its in zip(recalls["own"][predictor], recalls["other"][predictor], strict=True):
            assert mine == pytest.approx(its, abs=0.01), predictor

"""Routing profiles: what they predict, and that no process, crash or stranger can spoil the file."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leanmoe.errors import FormatError, LeanError, UnsupportedError
from leanmoe.experts.profile import DISTANCES, ModelIdentity, RoutingProfile, kept_successors
from trace_fixtures import made_up

SIZES = dict.fromkeys(range(4), 4096)
IDENTITY = ModelIdentity("test", 2, dict.fromkeys(SIZES, 12), (1.0, -2.0, 0.5))


def learned(seed: int, tokens: int = 40) -> RoutingProfile:
    profile = RoutingProfile(IDENTITY)
    profile.learn(made_up(SIZES, 12, 2, tokens, seed=seed, prompt=4))
    return profile


def test_a_profile_counts_picks_and_successors():
    """Predictions would be of something else."""
    trace = made_up(SIZES, 12, 2, 60)
    profile = RoutingProfile(IDENTITY)
    profile.learn(trace)
    picks = {layer: trace.rows["experts"][trace.rows["layer"] == layer] for layer in SIZES}
    expert = int(picks[1][0, 0])
    assert profile.popularity(1)[expert] == pytest.approx((picks[1] == expert).any(1).mean())
    used = (picks[1] == expert).any(1)
    followed = np.bincount(picks[3][used].ravel(), minlength=12)
    prior = 0.1 * profile.popularity(3)
    assert profile.predict(1, [expert], 2) == pytest.approx((followed + prior) / (used.sum() + 0.1), rel=1e-5)
    assert profile.hottest()[0][1] == int(np.bincount(picks[profile.hottest()[0][0]].ravel()).argmax())


def test_a_layer_that_fewer_tokens_went_through_is_as_hot_and_as_foreseeable():
    """Of prompts the last layer only sees the last tokens: by counts it would be warmed last, and never foreseen."""
    trace, last = made_up(SIZES, 12, 2, 400, seed=3), 3
    whole, cut = RoutingProfile(IDENTITY), RoutingProfile(IDENTITY)
    whole.learn(trace)
    cut.learn(trace.only((trace.rows["layer"] != last) | (trace.rows["token"] % 4 == 0)))
    assert cut.tokens[last] == pytest.approx(whole.tokens[last] / 4, rel=0.1)
    share = [sum(layer == last for layer, _ in profile.hottest()[:16]) for profile in (whole, cut)]
    assert abs(share[0] - share[1]) <= 2
    foreseen = [profile.after(2, range(12), 1).sum() for profile in (whole, cut)]
    assert foreseen[1] == pytest.approx(foreseen[0], rel=0.1)


def test_an_empty_profile_predicts_evenly():
    profile = RoutingProfile(IDENTITY)
    assert profile.popularity(0).tolist() == pytest.approx([2 / 12] * 12)
    assert profile.predict(0, [1, 2], 1).tolist() == pytest.approx([2 / 12] * 12)
    assert profile.hottest() == []


def test_old_tokens_fade():
    """A profile would never follow its user to another subject."""
    profile = learned(0)
    before = profile.counts.sum()
    profile._fade(50_000)
    assert profile.counts.sum() == pytest.approx(before / 2, rel=1e-3)
    assert profile.tokens[0] == pytest.approx(22, rel=1e-3)


@pytest.mark.parametrize(("layers", "experts"), [(1, 8), (48, 128), (60, 512), (92, 896)])
def test_a_profile_is_bounded(layers, experts):
    kept = kept_successors(layers, experts)
    assert 8 <= kept <= min(experts, 32)
    assert kept == 8 or layers * DISTANCES * experts * kept * 6 <= 16 << 20


def test_a_saved_profile_is_read_back_whole(tmp_path):
    profile = learned(0)
    profile.save(tmp_path / "profile")
    found = RoutingProfile.load(tmp_path / "profile", IDENTITY)
    for name in ("tokens", "counts", "successors", "follow"):
        assert (getattr(found, name) == getattr(profile, name)).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_profile_is_refused_with_its_name(tmp_path_factory, data):
    """A torn file would make the cache keep nonsense, or stop the model from loading."""
    path = tmp_path_factory.mktemp("damaged") / "profile"
    learned(0).save(path)
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, len(whole) - 1))
        damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    path.write_bytes(damaged)
    with pytest.raises(LeanError, match="profile"):
        RoutingProfile.load(path, IDENTITY)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ModelIdentity("other", 2, IDENTITY.experts, IDENTITY.fingerprint), "architecture"),
        (ModelIdentity("test", 4, IDENTITY.experts, IDENTITY.fingerprint), "top_k"),
        (ModelIdentity("test", 2, dict.fromkeys(SIZES, 16), IDENTITY.fingerprint), "experts"),
        (ModelIdentity("test", 2, IDENTITY.experts, (1.0, -1.0, 0.5)), "router weights"),
        (ModelIdentity("test", 2, IDENTITY.experts, (0.0, 0.0, 0.0)), "router weights"),
        (ModelIdentity("test", 2, IDENTITY.experts, (1.0, -2.0)), "fingerprint"),
    ],
)
def test_another_models_profile_is_refused_by_what_differs(tmp_path, other, words):
    """A fine-tune's habits would be taken for this model's."""
    learned(0).save(tmp_path / "profile")
    with pytest.raises(FormatError, match=f"another model.*{words}"):
        RoutingProfile.load(tmp_path / "profile", other)
    with pytest.raises(ValueError, match=words):
        learned(0).merge(RoutingProfile(other))


def test_another_quantisations_profile_is_taken(tmp_path):
    """Each quantisation of a model would have to learn anew."""
    learned(0).save(tmp_path / "profile")
    close = ModelIdentity("test", 2, IDENTITY.experts, (1.01, -2.02, 0.49))
    assert RoutingProfile.load(tmp_path / "profile", close).identity is close


def test_a_profile_of_a_newer_lean_is_refused_by_version(tmp_path):
    learned(0).save(tmp_path / "profile")
    whole = bytearray((tmp_path / "profile").read_bytes())
    whole[8] = 7
    (tmp_path / "profile").write_bytes(whole)
    with pytest.raises(UnsupportedError, match="version 7"):
        RoutingProfile.load(tmp_path / "profile", IDENTITY)


def test_a_merge_adds_up(tmp_path):
    for seed in (1, 2):
        learned(seed).merge_into(tmp_path / "profile")
    found = RoutingProfile.load(tmp_path / "profile", IDENTITY)
    assert found.tokens.tolist() == pytest.approx([88] * 4, rel=2e-3)
    both = learned(1).counts + learned(2).counts
    assert found.counts.ravel().tolist() == pytest.approx(both.ravel().tolist(), rel=2e-3)


def test_a_merge_does_not_overwrite_what_it_cannot_read(tmp_path):
    """A newer lean's profile would be lost to an older one."""
    (tmp_path / "profile").write_bytes(b"something else")
    with pytest.raises(FormatError, match="not a routing profile"):
        learned(0).merge_into(tmp_path / "profile")
    assert (tmp_path / "profile").read_bytes() == b"something else"


@pytest.mark.slow
def test_processes_that_merge_at_once_lose_nothing(tmp_path):
    """Two chats that end together would cost one of them its learning, or the file."""
    script = "import test_profile as t, sys; [t.learned(0).merge_into(sys.argv[1]) for _ in range(5)]"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", script, str(tmp_path / "profile")]
    running = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    found = RoutingProfile.load(tmp_path / "profile", IDENTITY)
    assert found.tokens[0] == pytest.approx(15 * 44, rel=0.01)

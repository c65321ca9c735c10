"""Routing traces: recorded, kept in a file, and exchanged as text without loss."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leanmoe.errors import FormatError, LeanError, UnsupportedError
from leanmoe.experts.policy import Phase
from leanmoe.experts.recorder import TraceRecorder
from leanmoe.experts.trace import NO_EXPERT, LayerFacts, RoutingTrace, row_type
from leanmoe.experts.trace_csv import export_csv, import_csv
from trace_fixtures import facts, made_up, recorded

SIZES = {0: 4096, 2: 8192}


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    return made_up(SIZES, 8, 2, 10, prompt=5)


def same(a: RoutingTrace, b: RoutingTrace) -> bool:
    about = (a.model, a.architecture, a.top_k, dict(a.layers)) == (
        b.model,
        b.architecture,
        b.top_k,
        dict(b.layers),
    )
    return about and bool((a.rows == b.rows).all())


def test_a_saved_trace_is_read_back_whole(trace, tmp_path):
    """A recording would be lost."""
    full = made_up(SIZES, 8, 2, 3, foresight=0.5)
    for i, kept in enumerate((trace, full)):
        kept.save(tmp_path / f"{i}.trace")
        found = RoutingTrace.load(tmp_path / f"{i}.trace")
        assert same(kept, found)
        assert found.has_probabilities is (kept is full)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_trace_is_refused_with_its_name(trace, tmp_path_factory, data):
    """A replay of garbage would look like a result."""
    path = tmp_path_factory.mktemp("damaged") / "a.trace"
    trace.save(path)
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, len(whole) - 1))
        damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    path.write_bytes(damaged)
    with pytest.raises(LeanError, match=r"a\.trace"):
        RoutingTrace.load(path)


@pytest.mark.parametrize(
    "change",
    [
        (b'"rows":30', b'"rows":99'),
        (b'"picks":2', b'"picks":1'),
        (b'"picks":2', b'"picks":0'),
        (b'"2":[8,', b'"3":[8,'),
        (b'"2":[8,', b'"2":[1,'),
        (b'"2":[8,', b'"2":[x,'),
        (b'"top_k":2', b'"top_k":0'),
        (b'"probabilities":0', b'"probabilities":9'),
    ],
)
def test_a_header_that_does_not_fit_the_rows_is_refused(trace, tmp_path, change):
    """A hand-made file with a right checksum could make the reader allocate or index out of bounds."""
    path = tmp_path / "a.trace"
    trace.save(path)
    whole = path.read_bytes()
    length = struct.unpack_from("<I", whole, 12)[0]
    assert change[0] in whole[20 : 20 + length]
    body = whole[20 : 20 + length].replace(*change) + whole[20 + length :]
    path.write_bytes(whole[:16] + zlib.crc32(body).to_bytes(4, "little") + body)
    with pytest.raises(FormatError, match=r"a\.trace.*record it again"):
        RoutingTrace.load(path)


def test_a_trace_of_a_newer_lean_is_refused_by_version(trace, tmp_path):
    trace.save(tmp_path / "a.trace")
    whole = bytearray((tmp_path / "a.trace").read_bytes())
    whole[8] = 9
    (tmp_path / "a.trace").write_bytes(whole)
    with pytest.raises(UnsupportedError, match="version 9"):
        RoutingTrace.load(tmp_path / "a.trace")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("layer", 1, "layer"),
        ("experts", (8, 0), "expert that its layer"),
        ("experts", (NO_EXPERT, 0), "no expert"),
        ("phase", 2, "phase"),
        ("weights", (np.nan, 0), "number"),
        ("step", 99, "earlier step"),
    ],
)
def test_rows_that_make_no_sense_are_refused(trace, field, value, words):
    """A policy would be asked about experts that do not exist."""
    rows = trace.rows.copy()
    rows[field][3] = value
    with pytest.raises(FormatError, match=words):
        RoutingTrace("m", "a", 2, trace.layers, rows)


def test_a_save_that_fails_leaves_the_old_file(trace, tmp_path, monkeypatch):
    """A full disk would cost the recording that was there."""
    trace.save(tmp_path / "a.trace")
    before = (tmp_path / "a.trace").read_bytes()
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        trace.save(tmp_path / "a.trace")
    assert [p.name for p in tmp_path.iterdir()] == ["a.trace"]
    assert (tmp_path / "a.trace").read_bytes() == before


def test_requests_are_what_a_cache_is_asked_for():
    """Replays would ask for experts twice in a prompt, or out of order, and count what the cache does not."""
    recorder = TraceRecorder("m", "a", 2, facts(SIZES, 8))
    recorder.record(Phase.PREFILL, 0, [[1, 2], [2, 3]], np.ones((2, 2)))
    recorder.record(Phase.PREFILL, 2, [[5, 6]], np.ones((1, 2)))  # the last layer, for the last token
    recorder.record(Phase.DECODE, 0, [[7, 1]], np.ones((1, 2)))
    recorder.record(Phase.DECODE, 2, [[0, 4]], np.ones((1, 2)))
    recorder.record(Phase.PREFILL, 0, [[1, 2]], np.ones((1, 2)))
    trace = recorder.trace()
    assert [(r.phase, r.layer, r.experts) for r in trace.requests()] == [
        (Phase.PREFILL, 0, (1, 2, 3)),
        (Phase.PREFILL, 2, (5, 6)),
        (Phase.DECODE, 0, (7, 1)),
        (Phase.DECODE, 2, (0, 4)),
        (Phase.PREFILL, 0, (1, 2)),
    ]
    assert trace.rows["token"].tolist() == [0, 1, 1, 2, 2, 3]
    assert trace.rows["turn"].tolist() == [0, 0, 0, 0, 0, 1]
    assert trace.tokens == {Phase.PREFILL: 3, Phase.DECODE: 1}
    assert trace.picks == 12


def test_a_recorder_stops_at_its_limit_and_says_so():
    """A long session would fill memory."""
    recorder = TraceRecorder("m", "a", 2, facts(SIZES, 8), limit=3)
    for _ in range(4):
        recorder.record(Phase.DECODE, 0, [[0, 1]], np.ones((1, 2)))
    assert recorder.full
    assert len(recorder.trace().rows) == 3


def test_a_recorder_wants_the_probabilities_it_was_made_for():
    recorder = TraceRecorder("m", "a", 2, facts(SIZES, 8), probabilities=8)
    with pytest.raises(ValueError, match="no router probabilities"):
        recorder.record(Phase.DECODE, 0, [[0, 1]], np.ones((1, 2)))


def test_router_probabilities_reach_the_requests():
    trace = made_up(SIZES, 8, 2, 2, prompt=3, foresight=0.5)
    first, *_, last = trace.requests()
    assert first.probabilities.shape == last.probabilities.shape == (8,)
    assert first.probabilities.tolist() == trace.rows["probabilities"][:3].max(0).tolist()


def test_csv_goes_round_without_loss(trace, tmp_path):
    """A trace could not be taken to another tool and back."""
    export_csv(trace, tmp_path / "a.csv")
    assert same(import_csv(tmp_path / "a.csv"), trace)


def test_recorded_csv_goes_round_without_loss(tmp_path):
    for name, picks in (("qwen", 44766), ("gemma", 28260)):
        trace = recorded(name)
        export_csv(trace, tmp_path / "a.csv")
        trace.save(tmp_path / "a.trace")
        assert trace.picks == picks
        assert same(import_csv(tmp_path / "a.csv"), trace)
        assert same(RoutingTrace.load(tmp_path / "a.trace"), trace)
        assert trace.tokens[Phase.DECODE] == 128


CSV = """# route_trace v1
# model=m arch=a n_layer=1 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=4096 dense_bytes=10
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.5,0,4096
0,0,0,0,1,1,0.25,0,4096
0,1,1,0,0,2,1,1,0
"""


def test_csv_is_read_as_written(tmp_path):
    (tmp_path / "a.csv").write_text(CSV)
    trace = import_csv(tmp_path / "a.csv")
    assert (trace.model, trace.architecture, trace.top_k) == ("m", "a", 2)
    assert trace.layers == {0: LayerFacts(4, 4096, 10)}
    assert trace.rows["experts"].tolist() == [[3, 1], [2, NO_EXPERT]]
    assert trace.rows["weights"].tolist() == [[0.5, 0.25], [1, 0]]
    assert [r.experts for r in trace.requests()] == [(3, 1), (2,)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("# route_trace v1", "# route_trace v2", "route_trace v1"),
        ("turn,phase", "phase,turn", "line 4"),
        ("0,0,0,0,1,1,0.25", "0,0,0,0,1,9,0.25", "expert that its layer"),
        ("0,0,0,0,1,1,0.25", "0,0,0,0,1,x,0.25", "after line 4"),
        ("0,0,0,0,1,1,0.25", "0,0,0,0,1,1.5,0.25", "line 6"),
        ("0,0,0,0,1,1,0.25", "0,0,0,0,5000,1,0.25", "line 6"),
        ("0,0,0,0,1,1,0.25", "0,0,0,3,1,1,0.25", "layer"),
        ("0,0,0,0,1,1,0.25", "0,0,0", "after line 4"),
        ("0,0,0,0,1,1,0.25", "0,0,0,0,2,1,0.25", "gap"),
        (" n_expert_used=2", "", "n_expert_used"),
        ("expert_bytes=4096 ", "expert_bytes=lots ", "odd"),
    ],
)
def test_csv_that_is_not_a_route_trace_is_refused(tmp_path, old, new, words):
    """A table of something else would be replayed."""
    assert old in CSV
    (tmp_path / "a.csv").write_text(CSV.replace(old, new, 1))
    with pytest.raises(FormatError, match=rf"(?s)a\.csv.*{words}"):
        import_csv(tmp_path / "a.csv")


def test_a_trace_without_rows_has_no_requests():
    assert list(RoutingTrace("m", "a", 2, facts(SIZES, 8), np.zeros(0, row_type(2))).requests()) == []

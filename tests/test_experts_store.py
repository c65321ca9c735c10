"""Reading expert files: direct or buffered, whole or not at all, checked against their digests."""

import ctypes
import gc
import logging
import mmap
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from expert_packs import contents, make_pack
from kernel_fixtures import expert_layout
from leanmoe import kernels
from leanmoe.errors import ExpertReadError
from leanmoe.experts import checked, files
from leanmoe.experts.store import ExpertStore
from leanmoe.pack import open_pack, verify_pack

SIZE = 16 * 4096


@pytest.fixture
def pack(tmp_path):
    return make_pack(tmp_path / "small.lmpack", {0: SIZE}, 3, 1)


def read(store, expert):
    buffer = mmap.mmap(-1, SIZE)
    store.read_into((0, expert), memoryview(buffer))
    return buffer[:]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_reads_the_whole_file(pack, direct, verify):
    store = ExpertStore(pack, direct=direct, verify=verify)
    assert store.size(0) == SIZE
    for _ in range(2):
        assert {(0, e): read(store, e) for e in range(3)} == contents(pack)


@pytest.mark.parametrize(
    ("verify", "first", "second"), [("first", True, True), ("always", True, True), ("never", False, False)]
)
def test_verify_says_which_reads_check_the_digest(pack, verify, first, second):
    """A flipped bit is found, also one that came after the first read, unless the user chose otherwise."""
    path = pack.expert_path(0, 1)
    good = path.read_bytes()
    bad = good[:-1] + bytes([good[-1] ^ 1])

    def finds_fault(store):
        try:
            read(store, 1)
        except ExpertReadError as error:
            return f"{path} has digest" in str(error)
        return False

    path.write_bytes(bad)
    assert finds_fault(ExpertStore(pack, verify=verify)) == first
    path.write_bytes(good)
    store = ExpertStore(pack, verify=verify)
    read(store, 1)
    path.write_bytes(bad)
    assert finds_fault(store) == second


@pytest.mark.parametrize(("verify", "checks"), [("first", 1), ("always", 3), ("never", 0)])
def test_a_file_that_stays_as_it_is_is_checked_once(pack, verify, checks, monkeypatch):
    """Hashing every read would cost as much as reading it."""
    store, seen = ExpertStore(pack, verify=verify), []
    check = store._check_digest
    monkeypatch.setattr(store, "_check_digest", lambda *args: (seen.append(args), check(*args)))
    for _ in range(3):
        read(store, 1)
    assert len(seen) == checks


def checks_of(store, monkeypatch, *experts):
    """The experts that are hashed when these are read."""
    seen, check = [], store._check_digest
    monkeypatch.setattr(store, "_check_digest", lambda key, *rest: (seen.append(key[1]), check(key, *rest)))
    for expert in experts:
        read(store, expert)
    store.close()
    return seen


@pytest.fixture
def old(pack):
    """The pack, longer ago than its files' times of change could be doubted."""
    began = time.time_ns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked, "_SETTLED_NS", -(1 << 62))
        assert checked.settled((0, 0, began))
        yield pack


def test_what_matched_once_is_not_hashed_by_later_processes(old, monkeypatch):
    """Or each start of a model of 75 GB would pay for all of them once more."""
    assert checks_of(ExpertStore(old), monkeypatch, 0, 1) == [0, 1]
    assert checks_of(ExpertStore(old), monkeypatch, 1, 2) == [2]
    assert checks_of(ExpertStore(old), monkeypatch, 0, 1, 2) == []
    assert checks_of(ExpertStore(old, verify="always"), monkeypatch, 0, 1) == [0, 1]
    assert verify_pack(old.path) == []


def test_only_files_that_stayed_as_they_were_are_trusted(old, monkeypatch):
    """Bytes written since, a file put in another's place, a copy of the pack: all are hashed again."""
    checks_of(ExpertStore(old), monkeypatch, 0, 1, 2)
    first, second = (old.expert_path(0, i) for i in range(2))
    data = bytearray(first.read_bytes())
    data[7] ^= 1
    with first.open("r+b") as file:
        file.write(data)
    with pytest.raises(ExpertReadError, match=f"{first} has digest"):
        read(ExpertStore(old), 0)
    copied = second.with_name("copied")
    shutil.copy2(second, copied)
    os.replace(copied, second)
    assert checks_of(ExpertStore(old), monkeypatch, 1, 2) == [1]
    shutil.copytree(old.path, again := old.path.with_name("again.lmpack"))
    assert checks_of(ExpertStore(open_pack(again)), monkeypatch, 1, 2) == [1, 2]


def test_a_file_changed_just_now_is_not_trusted_later(pack, monkeypatch):
    """Its next change might come within the same tick of the clock and leave no other time."""
    monkeypatch.setattr(checked, "_SETTLED_NS", 1 << 62)
    assert checks_of(ExpertStore(pack), monkeypatch, 0) == [0]
    assert checks_of(ExpertStore(pack), monkeypatch, 0) == [0]
    assert not (pack.path / checked.CHECKED).exists()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data[:-3], "cut short or damaged"),
        (lambda data: b"something else", "is not a list of checked experts"),
        (lambda data: data[:8] + b"\x63" + data[9:], "of version 99"),
        (lambda data: data + bytes(100), "has more than 116 bytes"),
    ],
)
def test_a_list_that_cannot_be_used_is_said_and_made_anew(old, monkeypatch, caplog, spoil, says):
    checks_of(ExpertStore(old), monkeypatch, 0, 1)
    path = old.path / checked.CHECKED
    path.write_bytes(spoil(path.read_bytes()))
    assert checks_of(ExpertStore(old), monkeypatch, 0, 1) == [0, 1]
    assert says in caplog.text
    caplog.clear()
    assert checks_of(ExpertStore(old), monkeypatch, 0, 1) == []
    assert not caplog.text


def test_a_pipe_in_place_of_the_list_is_not_waited_for(old, monkeypatch, caplog):
    os.mkfifo(old.path / checked.CHECKED)
    assert checks_of(ExpertStore(old), monkeypatch, 0) == [0]
    assert "not a regular file" in caplog.text


def test_a_pack_that_cannot_be_written_is_read_all_the_same(old, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "replace_file", refused)
    for _ in range(2):
        assert checks_of(ExpertStore(old), monkeypatch, 0) == [0]


def test_a_replaced_file_is_checked_again(pack):
    """An update of the pack under a running process would mix two models' experts."""
    store, path = ExpertStore(pack), pack.expert_path(0, 1)
    read(store, 1)
    other = path.with_name("other")
    other.write_bytes(bytes(SIZE))
    os.replace(other, path)
    with pytest.raises(ExpertReadError, match="digest"):
        read(store, 1)


def test_a_file_is_checked_again_after_it_failed(pack):
    path = pack.expert_path(0, 1)
    good, store = path.read_bytes(), ExpertStore(pack)
    for data in (b"\0" * SIZE, b"\1" * SIZE):
        path.write_bytes(data)
        with pytest.raises(ExpertReadError):
            read(store, 1)
    path.write_bytes(good)
    assert read(store, 1) == good


@pytest.mark.parametrize("direct", [True, False])
def test_the_error_says_what_was_found_and_wanted(pack, direct):
    path, store = pack.expert_path(0, 2), ExpertStore(pack, direct=direct)
    path.write_bytes(b"\0" * 5000)
    with pytest.raises(
        ExpertReadError, match=f"{path} has 5000 bytes, not {SIZE}; .*lean verify {pack.path}"
    ):
        read(store, 2)
    path.unlink()
    with pytest.raises(ExpertReadError, match=f"{path} cannot be read: No such file"):
        read(store, 2)
    os.mkfifo(path)
    with pytest.raises(ExpertReadError, match="not a regular file"):  # and does not wait for a writer
        read(store, 2)


def test_where_direct_reads_are_refused_buffered_ones_are_used_and_said_once(pack, caplog):
    """Some network file systems refuse O_DIRECT: lean must work there, and say that it costs page cache.

    A buffer off the page boundary makes any file system refuse the same way.
    """
    store = ExpertStore(pack)
    buffer = memoryview(mmap.mmap(-1, SIZE + 4096))[8 : 8 + SIZE]
    with caplog.at_level(logging.WARNING, "leanmoe.experts.store"):
        for expert in range(3):
            store.read_into((0, expert), buffer)
            assert bytes(buffer) == contents(pack)[0, expert]
    messages = [record.getMessage() for record in caplog.records]
    if not messages:
        pytest.skip("this file system takes unaligned direct reads")
    assert len(messages) == 1
    assert "refuses O_DIRECT" in messages[0]


def test_reading_time_does_not_add_up_over_threads(pack):
    """Four readers side by side made the disk look four times slower."""
    store, began = ExpertStore(pack, verify="never"), time.perf_counter()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: read(store, i % 3), range(200)))
    assert 0 < store.reading_seconds <= time.perf_counter() - began
    done = store.reading_seconds
    assert store.reading_seconds == done


@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_experts_arrive_in_the_order_that_is_asked_for_and_are_checked_in_the_files(tmp_path, verify):
    """A digest of rearranged bytes would match no file; one taken too late would let a damaged expert be used."""
    file = expert_layout(("Q4_K", "Q4_K", "Q6_K"), 256, 512)
    pack, arrangement = (
        make_pack(tmp_path / "one.lmpack", {0: file.file_bytes}, 1, 1),
        kernels.Arrangement(kernels.arranged(file)),
    )
    path, buffer = pack.expert_path(0, 0), memoryview(mmap.mmap(-1, file.file_bytes))
    good = path.read_bytes()
    wanted = bytearray(good)
    arrangement.apply(memoryview(wanted))
    if kernels.isa() == "avx512":
        assert wanted != good
    store = ExpertStore(pack, verify=verify)
    for _ in range(2):
        store.read_into((0, 0), buffer, arrangement)
        assert buffer == wanted
    path.write_bytes(good)  # another stamp, the same bytes
    store.read_into((0, 0), buffer, arrangement)
    assert buffer == wanted
    store.read_into((0, 0), buffer)
    assert buffer == good
    path.write_bytes(bytes(len(good)))
    if verify == "never":
        store.read_into((0, 0), buffer, arrangement)
    else:
        with pytest.raises(ExpertReadError, match="has digest"):
            store.read_into((0, 0), buffer, arrangement)


def test_an_arrangement_does_not_touch_what_is_not_an_expert_of_its_layer():
    """Bytes of the next slot would be overwritten."""
    file = expert_layout(("Q4_K", "Q4_K", "Q6_K"), 256, 512)
    arrangement = kernels.Arrangement(kernels.arranged(file))
    with pytest.raises(ValueError, match=f"{file.file_bytes} bytes"):
        arrangement.apply(memoryview(bytearray(file.file_bytes - 4096)))


def cached_pages(path):
    """How many pages of a file the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as f, mmap.mmap(f.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (SIZE // 4096))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(SIZE), pages) == 0
        gc.collect()  # from_buffer keeps the mapping open until it is gone
        return sum(page & 1 for page in pages)


@pytest.mark.parametrize("direct", [True, False])
def test_reading_leaves_nothing_in_the_page_cache(pack, direct):
    """Otherwise a run in a container is killed although lean keeps to its budget."""
    paths = [pack.expert_path(0, expert) for expert in range(3)]
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    if sum(map(cached_pages, paths)):
        pytest.skip("this file system keeps its files in memory")
    store = ExpertStore(pack, direct=direct)
    for expert in range(3):
        read(store, expert)
    assert sum(map(cached_pages, paths)) == 0

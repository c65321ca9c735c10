"""`lean pack --consume`: the source's disk space becomes the pack's, and nothing is lost on the way."""

import errno
import os
from pathlib import Path

import gguf
import pytest

from gguf_fixtures import write_moe_gguf
from leanmoe.errors import BudgetError, FormatError, UsageError
from leanmoe.formats.gguf import read_gguf
from leanmoe.pack import PackProgress, consume, open_pack, pack_gguf, steps, verify_pack, writer
from leanmoe.pack.consume import whole_pages
from leanmoe.pack.plan import plan_pack
from leanmoe.pack.source import GGUFSource


def tree(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(steps, "STEP_BYTES", 256 << 10)
    return write_moe_gguf(tmp_path / "m.gguf", layers=2, experts=16, d=256, f=128)


def test_source_is_freed_while_packing_and_gone_at_the_end(tmp_path: Path, source: Path) -> None:
    """Someone with room for one copy could not pack."""
    wanted = tree(pack_gguf(source, tmp_path / "kept.lmpack"))
    size, whole = source.stat().st_size, allocated(source)
    held: list[int] = []

    def progress(_: PackProgress) -> None:
        partial = tmp_path / "m.lmpack.partial"
        held.append(allocated(source) + sum(allocated(p) for p in partial.rglob("*") if p.is_file()))
        assert source.stat().st_size == size

    out = pack_gguf(source, tmp_path / "m.lmpack", consume=True, progress=progress)
    assert not source.exists()
    assert tree(out) == wanted
    assert max(held) < whole + 3 * steps.STEP_BYTES
    assert sum(len(data) for data in wanted.values()) > 4 * steps.STEP_BYTES


def test_all_shards_are_consumed(tmp_path: Path) -> None:
    """Shards would be left behind, full or empty."""
    write_moe_gguf(tmp_path / "m.gguf", split_max_tensors=5)
    pack_gguf(sorted(tmp_path.glob("m-*"))[1], tmp_path / "m.lmpack", consume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m.lmpack"]
    assert verify_pack(tmp_path / "m.lmpack") == []


def test_less_free_space_is_wanted(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check for free space would refuse what --consume makes possible."""
    real = os.statvfs(tmp_path)
    plan = plan_pack(GGUFSource(read_gguf(source)))
    free = plan.nbytes // 2
    values = list(real)
    values[4] = free // real.f_frsize  # f_bavail
    monkeypatch.setattr(writer.os, "statvfs", lambda _: os.statvfs_result(values))
    with pytest.raises(BudgetError, match="give --consume"):
        pack_gguf(source, tmp_path / "m.lmpack")
    pack_gguf(source, tmp_path / "m.lmpack", consume=True)
    assert verify_pack(tmp_path / "m.lmpack") == []


def interrupt(source: Path, out: Path) -> None:
    def progress(at: PackProgress) -> None:
        if at.done > at.total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_gguf(source, out, consume=True, progress=progress)


def test_once_begun_the_source_is_not_taken_for_whole(tmp_path: Path, source: Path) -> None:
    """Holes would be packed as weights."""
    out, partial = tmp_path / "m.lmpack", tmp_path / "m.lmpack.partial"
    whole = allocated(source)
    interrupt(source, out)
    assert allocated(source) < whole
    with pytest.raises(UsageError, match="give --consume again"):
        pack_gguf(source, out)
    lost = partial / "experts/000/001"
    kept = lost.read_bytes()
    lost.unlink()
    with pytest.raises(FormatError, match=r"experts/000/001.*fetch the source again"):
        pack_gguf(source, out, consume=True)
    lost.write_bytes(kept)
    pack_gguf(source, out, consume=True)
    assert verify_pack(out) == []


def test_a_source_that_was_freed_in_part_is_refused_by_everybody(tmp_path: Path, source: Path) -> None:
    """Freed parts read as zeros: they were packed as weights, with digests that verify."""
    out, partial = tmp_path / "m.lmpack", tmp_path / "m.lmpack.partial"
    interrupt(source, out)
    for again in (False, True):
        with pytest.raises(FormatError, match=r"m\.gguf: parts of it were freed.*same name for the pack"):
            pack_gguf(source, tmp_path / "other.lmpack", consume=again)
    with pytest.raises(FormatError, match="freed"):
        read_gguf(source)
    with pytest.raises(ValueError, match="magic"):
        gguf.GGUFReader(source)
    moved = partial.rename(tmp_path / "moved")
    with pytest.raises(FormatError, match="fetch the model again"):
        pack_gguf(source, out, consume=True)
    moved.rename(partial)
    pack_gguf(source, out, consume=True)
    assert verify_pack(out) == []


def test_a_pack_begun_first_does_not_take_what_another_freed(tmp_path: Path, source: Path) -> None:
    """Two packs of one source, both begun with --consume: the first would go on and copy the other's holes."""

    def stop(_: PackProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_gguf(source, tmp_path / "first.lmpack", consume=True, progress=stop)  # nothing is freed yet
    interrupt(source, tmp_path / "second.lmpack")
    with pytest.raises(FormatError, match="freed"):
        pack_gguf(source, tmp_path / "first.lmpack", consume=True)
    pack_gguf(source, tmp_path / "second.lmpack", consume=True)
    assert verify_pack(tmp_path / "second.lmpack") == []


def test_a_source_is_consumed_by_one_pack_at_a_time(tmp_path: Path, source: Path) -> None:
    """Each would copy the holes that the other made."""
    tried = []

    def progress(_: PackProgress) -> None:
        if not tried:
            tried.append(True)
            with pytest.raises(UsageError, match=r"m\.gguf: another lean pack"):
                pack_gguf(source, tmp_path / "other.lmpack", consume=True)

    pack_gguf(source, tmp_path / "m.lmpack", consume=True, progress=progress)
    assert tried
    assert verify_pack(tmp_path / "m.lmpack") == []


def test_a_source_fetched_again_is_not_deleted(tmp_path: Path, source: Path) -> None:
    """A run that was killed while it deleted the source would, run again, delete a fresh copy."""
    out, fresh = tmp_path / "m.lmpack", source.read_bytes()
    interrupt(source, out)
    journal = (tmp_path / "m.lmpack.partial/journal").read_bytes()
    pack_gguf(source, out, consume=True)
    (out / "journal").write_bytes(journal)
    source.write_bytes(fresh)
    pack_gguf(source, out, consume=True)
    assert source.exists()
    assert not (out / "journal").exists()


def test_a_file_system_that_cannot_punch_holes_is_refused_first(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source would be kept in full although it was to be freed, and the disk fill up."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(consume, "punch", refuse)
    with pytest.raises(UsageError, match="pack without --consume"):
        pack_gguf(source, tmp_path / "m.lmpack", consume=True)
    assert [p.name for p in tmp_path.iterdir()] == [source.name]


def test_linked_sources_are_refused(tmp_path: Path, source: Path) -> None:
    """A model shared with another program, or kept in a download cache, would be emptied there too."""
    link = tmp_path / "link.gguf"
    link.symlink_to(source)
    with pytest.raises(UsageError, match="is a link to"):
        pack_gguf(link, tmp_path / "m.lmpack", consume=True)
    os.link(source, tmp_path / "second.gguf")
    with pytest.raises(UsageError, match="hard links"):
        pack_gguf(source, tmp_path / "m.lmpack", consume=True)
    assert open_pack(pack_gguf(link, tmp_path / "m.lmpack")).manifest.expert_count == 16


def test_only_whole_pages_inside_the_ranges_are_freed() -> None:
    """Bytes beside those already packed would be lost."""
    a, b = Path("a"), Path("b")
    ranges = [(a, 4097, 9000), (a, 9000, 12288), (b, 0, 4096), (a, 20000, 20100), (b, 4000, 8191)]
    assert whole_pages(ranges) == [(a, 8192, 12288), (b, 0, 4096)]

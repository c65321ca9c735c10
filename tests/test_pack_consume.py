"""`lean pack --consume`: the source's disk space becomes the pack's, and nothing is lost on the way."""

import errno
import os
from pathlib import Path

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

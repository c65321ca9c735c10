"""A `lean pack` that is killed, cut off from power or out of disk resumes, and ends in the very same pack."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_fixtures import write_moe_gguf
from leanmoe.errors import BudgetError, FormatError, UsageError
from leanmoe.formats.gguf import read_gguf
from leanmoe.pack import PackProgress, open_pack, pack_gguf, steps, verify_pack
from pack_crash import run_and_die

Tree = dict[str, bytes]


def tree(path: Path) -> Tree:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture
def memory_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory where syncing costs nothing, for the tests that do it thousands of times."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose pack takes several steps; the trunk takes several alone."""
    monkeypatch.setattr(steps, "STEP_BYTES", 24 << 10)
    monkeypatch.setattr(steps, "STEP_FILES", 3)
    return write_moe_gguf(tmp_path / "m.gguf", layers=3, extras=True)


@pytest.fixture
def wanted(tmp_path: Path, source: Path) -> Tree:
    return tree(pack_gguf(source, tmp_path / "wanted.lmpack"))


def steps_of_a_run(source: Path, out: Path, *, consume: bool = False) -> int:
    """How many steps on disk a whole run takes, by counting up until one survives; a copy of the source is used."""
    low, high = 1, 4096
    while low < high:
        middle = (low + high) // 2
        copy = shutil.copy2(source, out.with_name("probe.gguf"))
        survived = run_and_die(lambda copy=copy: pack_gguf(copy, out, consume=consume), middle)
        for leftover in (out, out.with_name(out.name + ".partial")):
            shutil.rmtree(leftover, ignore_errors=True)
        low, high = (low, middle) if survived else (middle + 1, high)
    return low - 1


def die_everywhere(
    source: Path, disk: Path, wanted: Tree, stride: int, *, consume: bool, power_cut: bool
) -> None:
    out, partial = disk / "m.lmpack", disk / "m.lmpack.partial"
    kept, source = source, disk / source.name
    total = steps_of_a_run(kept, out, consume=consume)
    assert total > 60

    def act() -> None:
        pack_gguf(source, out, consume=consume)

    def unfinished() -> bool:
        return not out.exists() or (out / "journal").exists()

    # The last steps, where the pack gets its name, are each tried whatever the stride.
    for nth in sorted({*range(1, total + 1, stride), *range(total - 8, total + 1)}):
        shutil.copy2(kept, source)
        assert not run_and_die(act, nth, power_cut=disk if power_cut else None)
        if source.exists() and source.read_bytes() != kept.read_bytes():  # whole, or refused by everybody
            with pytest.raises(FormatError, match="freed by lean pack --consume"):
                read_gguf(source)
        # Killed a second time while resuming, then left to finish.
        if unfinished() and not run_and_die(act, 1 + nth % 17) and unfinished():
            act()
        assert tree(out) == wanted, f"killed at step {nth} of {total}"
        assert not partial.exists()
        assert source.exists() == (not consume)
        shutil.rmtree(out)


@pytest.mark.parametrize("power_cut", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize("consume", [False, True], ids=["keep", "consume"])
def test_dying_anywhere_and_resuming_gives_the_same_pack(
    memory_disk: Path, source: Path, wanted: Tree, consume: bool, power_cut: bool
) -> None:
    """A pack interrupted at a bad moment would be lost, or be subtly wrong."""
    die_everywhere(source, memory_disk, wanted, 13, consume=consume, power_cut=power_cut)


@pytest.mark.slow
@pytest.mark.parametrize("power_cut", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize("consume", [False, True], ids=["keep", "consume"])
def test_dying_at_every_third_step(
    memory_disk: Path, source: Path, wanted: Tree, consume: bool, power_cut: bool
) -> None:
    """As above, with smaller gaps."""
    die_everywhere(source, memory_disk, wanted, 3, consume=consume, power_cut=power_cut)


def interrupt_after(nbytes: int, source: Path, out: Path, *, consume: bool = False) -> list[PackProgress]:
    """Starts packing and interrupts it, as Ctrl-C would, once `nbytes` are done."""
    seen: list[PackProgress] = []

    def progress(at: PackProgress) -> None:
        seen.append(at)
        if at.done >= nbytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_gguf(source, out, consume=consume, progress=progress)
    return seen


def test_an_interrupted_pack_goes_on_where_it_was(tmp_path: Path, source: Path, wanted: Tree) -> None:
    """Ctrl-C during a long pack would throw hours away."""
    out = tmp_path / "m.lmpack"
    total = interrupt_after(1, source, out)[0].total
    before = interrupt_after(total // 2, source, out)[-1].done
    seen: list[PackProgress] = []
    pack_gguf(source, out, progress=seen.append)
    assert seen[0].done > before - 2 * steps.STEP_BYTES
    assert [at.done for at in seen] == sorted(at.done for at in seen)
    assert (seen[-1].done, seen[-1].total) == (total, total)
    assert tree(out) == wanted


def test_recorded_files_are_not_written_again(tmp_path: Path, source: Path) -> None:
    """Resuming would cost as much as starting over."""
    out = tmp_path / "m.lmpack"
    total = interrupt_after(1, source, out)[0].total
    interrupt_after(total, source, out)
    partial = tmp_path / "m.lmpack.partial"
    done = [
        line.split("  ")[1]
        for line in (partial / "journal").read_text().splitlines()[1:]
        if line[:4] != "mark"
    ]
    assert len(done) > 6
    times = {name: (partial / name).stat().st_mtime_ns for name in done}
    pack_gguf(source, out)
    assert {name: (out / name).stat().st_mtime_ns for name in done} == times


def test_a_changed_source_is_not_mixed_in(tmp_path: Path, source: Path) -> None:
    """Half of one model and half of another would be packed together."""
    out = tmp_path / "m.lmpack"
    interrupt_after(40_000, source, out)
    os.utime(source, ns=(0, 0))
    with pytest.raises(FormatError, match=r"m\.lmpack\.partial.*delete it"):
        pack_gguf(source, out)
    with pytest.raises(FormatError, match="delete it"):
        pack_gguf(write_moe_gguf(tmp_path / "other.gguf", layers=2), out)


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path, source: Path) -> None:
    """A file still being downloaded would be packed half empty."""

    def progress(at: PackProgress) -> None:
        os.utime(source, ns=(at.done, at.done))

    with pytest.raises(FormatError, match="changed while it was packed"):
        pack_gguf(source, tmp_path / "m.lmpack", progress=progress)
    assert not (tmp_path / "m.lmpack").exists()


def test_a_source_cut_short_meanwhile_is_named(tmp_path: Path, source: Path) -> None:
    """Zeros would be packed in place of weights."""

    def progress(_: PackProgress) -> None:
        os.truncate(source, 20_000)

    with pytest.raises(FormatError, match=r"m\.gguf: ends at byte 20000"):
        pack_gguf(source, tmp_path / "m.lmpack", progress=progress)


def test_files_lost_from_a_partial_pack_are_made_again(tmp_path: Path, source: Path, wanted: Tree) -> None:
    """A pack would be completed without the files that someone removed."""
    out, partial = tmp_path / "m.lmpack", tmp_path / "m.lmpack.partial"
    interrupt_after(120_000, source, out)
    (partial / "trunk.gguf").unlink()
    os.truncate(partial / "experts/000/000", 100)
    assert tree(pack_gguf(source, out)) == wanted


def test_only_one_pack_writes_at_a_time(tmp_path: Path, source: Path) -> None:
    """Two `lean pack` at once would write over each other."""
    out = tmp_path / "m.lmpack"
    refused = []

    def progress(_: PackProgress) -> None:
        if not refused:
            with pytest.raises(UsageError, match="another lean pack"):
                pack_gguf(source, out)
            refused.append(True)

    pack_gguf(source, out, progress=progress)
    assert refused
    assert verify_pack(out) == []


def test_a_file_size_limit_ends_in_a_clear_error(tmp_path: Path, source: Path, wanted: Tree) -> None:
    """Running out of quota would end in a traceback, or in a pack that is cut short."""
    out = tmp_path / "m.lmpack"
    script = (
        "import resource, sys; from leanmoe.errors import BudgetError; from leanmoe.pack import pack_gguf\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try: pack_gguf(sys.argv[1], sys.argv[2])\n"
        "except BudgetError as error: print(error)"
    )
    command = [sys.executable, "-c", script, str(source), str(out)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "m.lmpack.partial" in said
    assert "bytes) more" in said or "bytes): make room" in said
    assert not out.exists()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 50_000
    assert tree(pack_gguf(source, out)) == wanted


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system here: {error}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_free_space_is_checked_before_the_first_byte(small_disk: Path, source: Path) -> None:
    """An hour into packing, the disk would be full."""
    (small_disk / "filler").write_bytes(bytes(900_000))
    with pytest.raises(BudgetError, match=r"needs .* bytes\) more, but .* are free"):
        pack_gguf(source, small_disk / "m.lmpack")
    assert os.listdir(small_disk) == ["filler"]


def test_a_full_disk_leaves_what_can_be_resumed(small_disk: Path, source: Path, wanted: Tree) -> None:
    """A disk that fills up while packing would cost all that was done, or leave half a pack under its name."""
    out, filler = small_disk / "m.lmpack", small_disk / "filler"

    def fill(at: PackProgress) -> None:
        if at.done > at.total // 2 and not filler.exists():
            free = os.statvfs(small_disk)
            filler.write_bytes(bytes(free.f_bavail * free.f_frsize))

    with pytest.raises(BudgetError, match=r"m\.lmpack\.partial: No space left.*make room"):
        pack_gguf(source, out, progress=fill)
    assert not out.exists()
    with pytest.raises(BudgetError, match="are free"):
        pack_gguf(source, out)
    filler.unlink()
    assert tree(pack_gguf(source, out)) == wanted
    assert open_pack(out).manifest.expert_files == 12

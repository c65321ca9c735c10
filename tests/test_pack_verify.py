"""`lean verify` finds every fault of a pack, not only the first."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_fixtures import write_moe_gguf
from leanmoe.errors import FormatError, LeanError, UsageError
from leanmoe.pack import PackProgress, open_pack, pack_gguf, verify_pack


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pack")
    return pack_gguf(write_moe_gguf(directory / "m.gguf"), directory / "m.lmpack")


@pytest.fixture
def pack(whole: Path, tmp_path: Path) -> Path:
    """A pack that the test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "m.lmpack"))


def faults(pack: Path) -> dict[str, str]:
    return {fault.name: fault.what for fault in verify_pack(pack)}


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_sound_pack_has_no_faults(pack: Path) -> None:
    """`lean verify` would cry wolf."""
    seen: list[PackProgress] = []
    assert verify_pack(pack, seen.append) == []
    assert seen[-1].done == seen[-1].total > 0


def test_all_faults_are_listed_with_their_files(pack: Path) -> None:
    """Someone with a damaged disk would have to verify again after every repair."""
    experts = pack / "experts"
    flip(experts / "000/000", 70_000 % (os.path.getsize(experts / "000/000") * 8))
    os.truncate(experts / "000/001", 4096)
    (experts / "000/002").unlink()
    (experts / "001/000").rename(pack / "swap")
    (experts / "001/001").rename(experts / "001/000")
    (pack / "swap").rename(experts / "001/001")
    (experts / "001/004").write_text("stray")
    flip(pack / "trunk.gguf", 8 * (os.path.getsize(pack / "trunk.gguf") - 1))
    found = faults(pack)
    assert set(found) == {
        *(f"experts/000/00{i}" for i in range(3)),
        *(f"experts/001/00{i}" for i in (0, 1, 4)),
        "trunk.gguf",
    }
    assert "altered" in found["experts/000/000"]
    assert "4096 bytes long" in found["experts/000/001"]
    assert found["experts/000/002"] == "missing"
    assert found["experts/001/000"] == "holds the bytes of experts/001/001"
    assert found["experts/001/001"] == "holds the bytes of experts/001/000"
    assert found["experts/001/004"] == "unexpected file"
    assert "altered" in found["trunk.gguf"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_single_flipped_bit_is_found(whole: Path, data: st.DataObject) -> None:
    """Silent damage would give wrong text."""
    files = sorted(p for p in whole.rglob("*") if p.is_file() and p.name != "digests")
    path = data.draw(st.sampled_from(files))
    bit = data.draw(st.integers(0, path.stat().st_size * 8 - 1))
    flip(path, bit)
    try:
        assert list({fault.name for fault in verify_pack(whole)}) == [path.relative_to(whole).as_posix()]
    finally:
        flip(path, bit)


def test_faults_are_found_although_the_manifest_is_broken(pack: Path) -> None:
    """One damaged file would hide all the others."""
    (pack / "manifest.json").write_text("{}")
    (pack / "experts/001/003").unlink()
    assert {"manifest.json", "experts/001/003"} == set(faults(pack))


def test_without_digests_that_is_the_fault(pack: Path) -> None:
    """A pack without digests would pass as sound."""
    (pack / "digests").unlink()
    assert list(faults(pack)) == ["digests"]
    (pack / "digests").write_text("nonsense\n")
    assert list(faults(pack)) == ["digests"]


def test_a_shortened_digest_list_is_a_fault(pack: Path) -> None:
    """Files without a digest would pass unread."""
    lines = (pack / "digests").read_text().splitlines()
    (pack / "digests").write_text("\n".join(lines[:-1]) + "\n")
    assert "experts/001/003" in faults(pack)


def test_what_is_no_pack_is_a_wrong_use(tmp_path: Path) -> None:
    """A mistyped path would read as a damaged pack."""
    with pytest.raises(UsageError):
        verify_pack(tmp_path / "none.lmpack")


@pytest.mark.parametrize("name", ["digests", "trunk.gguf", "experts/000/001"])
@pytest.mark.parametrize("kind", ["pipe", "endless device"])
def test_a_special_file_in_a_pack_is_a_fault_not_a_wait(pack: Path, name: str, kind: str) -> None:
    """A pipe never ends opening and /dev/zero never ends: lean would hang, or eat all memory."""
    path = pack / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    (pack / "manifest.json").write_text("{}")  # so that no size is known
    assert "not a regular file" in faults(pack)[name]
    with pytest.raises(LeanError):
        open_pack(pack)


def test_a_manifest_and_digests_that_are_special_files_do_not_open(pack: Path) -> None:
    for name in ("digests", "manifest.json"):
        (pack / name).unlink()
        os.mkfifo(pack / name)
        with pytest.raises(FormatError, match=name):
            open_pack(pack)

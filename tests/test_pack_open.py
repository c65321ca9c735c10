"""Opening packs that are damaged or hostile: a clear error that names the file, before anything is allocated."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_fixtures import write_moe_gguf
from leanmoe.errors import FormatError, LeanError, UnsupportedError
from leanmoe.pack import Manifest, open_pack, pack_gguf, verify_pack

Document = dict[str, Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pack")
    return pack_gguf(write_moe_gguf(directory / "m.gguf", extras=True), directory / "m.lmpack")


@pytest.fixture
def pack(whole: Path, tmp_path: Path) -> Path:
    """A pack that the test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "m.lmpack"))


def setting(value: Any, *keys: Any) -> Callable[[Document], None]:
    """A change that sets the field reached by `keys`."""

    def change(document: Document) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


UP = ("layers", 0, "sections", "up")
HOSTILE: dict[str, tuple[Callable[[Document], object], str]] = {
    "other format": (setting("zip", "format"), "format"),
    "huge expert count": (setting(1 << 60, "expert_count"), "expert_count"),
    "huge layer experts": (setting(1 << 60, "layers", 0, "experts"), "experts"),
    "many experts": (
        lambda d: [x.update(experts=65536) for x in d["layers"]] + [d.update(expert_count=65536)],
        "lists",
    ),
    "experts disagree": (setting(3, "layers", 0, "experts"), "expert_count"),
    "top-k above experts": (setting(5, "expert_used_count"), "expert_used_count"),
    "top-k zero": (setting(0, "expert_used_count"), "expert_used_count"),
    "top-k true": (setting(True, "expert_used_count"), "expert_used_count"),
    "layer negative": (setting(-1, "layers", 0, "layer"), "layer"),
    "layer twice": (setting(0, "layers", 1, "layer"), "ascending"),
    "layers no list": (setting({}, "layers"), "list"),
    "layer no object": (setting(7, "layers", 0), "object"),
    "file bytes huge": (setting(1 << 62, "layers", 0, "file_bytes"), "file_bytes"),
    "file bytes odd": (setting(8193, "layers", 0, "file_bytes"), "4096"),
    "file too small": (setting(4096, "layers", 0, "file_bytes"), "4096 bytes"),
    "offset negative": (setting(-64, *UP, "offset"), "offset"),
    "offset odd": (setting(2177, *UP, "offset"), "64"),
    "offset overlaps": (setting(0, *UP, "offset"), "overlaps"),
    "offset outside": (setting(1 << 40, *UP, "offset"), "ends at"),
    "offset a string": (setting("0", *UP, "offset"), "offset"),
    "offset a float": (setting(64.0, *UP, "offset"), "offset"),
    "bytes wrong": (setting(2112, *UP, "bytes"), "takes"),
    "shape empty": (setting([], *UP, "shape"), "shape"),
    "shape zero": (setting([0, 64], *UP, "shape"), "shape"),
    "shape huge": (setting([1 << 40, 1 << 40], *UP, "shape"), "shape"),
    "shape of three": (setting([2, 16, 64], *UP, "shape"), "shape"),
    "shape transposed": (setting([64, 32], *UP, "shape"), "shape"),
    "row no whole block": (setting([32, 65], *UP, "shape"), "Q8_0"),
    "section unknown": (setting({}, "layers", 0, "sections", "../../etc"), "unknown section"),
    "section missing": (lambda d: d["layers"][0]["sections"].pop("up"), "'up' is missing"),
    "field missing": (lambda d: d.pop("trunk"), "'trunk' is missing"),
    "trunk size": (setting(4096, "trunk", "bytes"), "trunk.gguf"),
    "trunk negative": (setting(-1, "trunk", "bytes"), "bytes"),
    "source outside": (setting("../m.gguf", "source", "files", 0, "name"), "file name"),
    "source absolute": (setting("/m.gguf", "source", "files", 0, "name"), "file name"),
    "source dots": (setting("..", "source", "files", 0, "name"), "file name"),
    "source digest": (setting("xyz", "source", "files", 0, "header_blake3"), "header_blake3"),
    "skipped numbers": (setting([1], "skipped"), "skipped"),
    "architecture": (setting("llama", "architecture"), "architecture"),
    "architecture empty": (setting("", "architecture"), "architecture"),
    "version zero": (setting(0, "version"), "version"),
    "more layers than files": (lambda d: d["layers"].append({**d["layers"][1], "layer": 2}), "lists"),
}
UNSUPPORTED = {
    "newer version": (setting(2, "version"), "version 2"),
    "tensor type": (setting("Q9_9", *UP, "type"), "Q9_9"),
    "layout": (setting("tiled", *UP, "layout"), "tiled"),
}


def rewrite(pack: Path, text: bytes) -> None:
    """Puts `text` in the manifest's place, with its right digest, so that only its contents can be at fault."""
    (pack / "manifest.json").write_bytes(text)
    lines = (pack / "digests").read_text().splitlines()
    lines[0] = f"{blake3.blake3(text).hexdigest()}  manifest.json"
    (pack / "digests").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("case", [*HOSTILE, *UNSUPPORTED])
def test_hostile_manifests_are_refused(pack: Path, case: str) -> None:
    """A manifest from elsewhere would make lean crash, exhaust memory or read outside the pack."""
    change, word = (HOSTILE | UNSUPPORTED)[case]
    document = json.loads((pack / "manifest.json").read_bytes())
    change(document)
    rewrite(pack, json.dumps(document).encode())
    tracemalloc.start()
    with pytest.raises(UnsupportedError if case in UNSUPPORTED else FormatError, match=word) as caught:
        open_pack(pack)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(pack) in str(caught.value)
    assert peak < 4 << 20


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"nonsense",
        b'{"format": NaN}',
        b'{"format": "lmpack", "format": "lmpack"}',
        b"[" * 100_000,
        b'{"format": "lmpack", "version": ' + b"9" * 5000 + b"}",
        b'{"format": "lmpack", "version": Infinity}',
        b"\xff\xfe",
    ],
    ids=["empty", "list", "no JSON", "NaN", "field twice", "deep", "huge number", "infinity", "no UTF-8"],
)
def test_what_is_no_manifest_is_refused(pack: Path, text: bytes) -> None:
    """A damaged manifest would end in a traceback."""
    rewrite(pack, text)
    with pytest.raises(FormatError, match=r"manifest\.json"):
        open_pack(pack)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_field_of_any_value_ends_in_a_lean_error_or_a_sound_manifest(
    whole: Path, data: st.DataObject
) -> None:
    """A field that nobody thought of would pass unchecked."""
    document = json.loads((whole / "manifest.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        node: Any = document
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(node[key], dict | list) and node[key] and data.draw(st.integers(0, 5)):
                node = node[key]
                continue
            node[key] = data.draw(values)
            break
    try:
        manifest = Manifest.from_json(json.dumps(document).encode(), whole / "manifest.json")
    except LeanError:
        return
    for layer in manifest.layers:
        for part in layer.layout.sections.values():
            assert 0 <= part.offset < part.offset + part.nbytes <= layer.layout.file_bytes


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 6000), patch=st.binary(max_size=4), cut=st.booleans())
def test_any_damage_to_the_manifests_bytes_ends_in_a_lean_error(
    whole: Path, at: int, patch: bytes, cut: bool
) -> None:
    """A flipped bit in a manifest would end in a traceback."""
    text = (whole / "manifest.json").read_bytes()
    damaged = text[:at] + patch + (b"" if cut else text[at + len(patch) :])
    try:
        manifest = Manifest.from_json(damaged, whole / "manifest.json")
    except LeanError:
        return
    assert manifest.expert_files <= 1 << 20


def test_a_manifest_survives_its_own_reading(whole: Path) -> None:
    """A pack would differ from what was written."""
    text = (whole / "manifest.json").read_bytes()
    manifest = Manifest.from_json(text, whole / "manifest.json")
    assert manifest.to_json() == text
    assert open_pack(whole).manifest == manifest


def test_fields_of_a_later_lean_are_passed_over(pack: Path) -> None:
    """A harmless addition to the format would lock older leans out."""
    document = json.loads((pack / "manifest.json").read_bytes())
    document["later"] = {"x": 1}
    rewrite(pack, json.dumps(document).encode())
    (pack / "profile").write_text("later")
    assert open_pack(pack).manifest.expert_count == 4
    assert verify_pack(pack) == []


def test_an_altered_manifest_is_noticed(pack: Path) -> None:
    """Sections would be read from the wrong place, giving wrong text."""
    text = (pack / "manifest.json").read_bytes()
    (pack / "manifest.json").write_bytes(text.replace(b'"tiny"', b'"tina"') + b"\n")
    with pytest.raises(FormatError, match="altered"):
        open_pack(pack)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("experts/001/002", "missing"),
        ("experts/001/002", "short"),
        ("experts/001/002", "long"),
        ("experts/001/002", "a directory"),
        ("experts/001", "missing"),
        ("trunk.gguf", "missing"),
        ("trunk.gguf", "short"),
        ("digests", "missing"),
        ("digests", "short"),
    ],
)
def test_missing_and_cut_files_are_named_on_opening(pack: Path, name: str, how: str) -> None:
    """A broken copy would run until it met the missing expert."""
    file = pack / name
    if how == "short":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "long":
        file.write_bytes(file.read_bytes() + b"x")
    elif file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink()
        if how == "a directory":
            file.mkdir()
    with pytest.raises(FormatError, match=name):
        open_pack(pack)


@pytest.mark.parametrize(
    "line",
    [
        "x" * 64 + "  trunk.gguf",
        "0" * 64 + "  ../../etc/passwd",
        "0" * 64 + "  /etc/passwd",
        "0" * 63 + "  trunk.gguf",
        "",
    ],
)
def test_bad_lines_among_the_digests_are_refused(pack: Path, line: str) -> None:
    """A list of digests could lead outside its pack."""
    lines = (pack / "digests").read_text().splitlines()
    lines[1] = line
    (pack / "digests").write_text("\n".join(lines) + "\n")
    with pytest.raises(FormatError, match="digests: line 2"):
        open_pack(pack)


def test_a_digest_too_many_or_twice_is_refused(pack: Path) -> None:
    """A list of digests could hide which file it speaks of."""
    text = (pack / "digests").read_text()
    (pack / "digests").write_text(text + "0" * 64 + "  experts/009/009\n")
    with pytest.raises(FormatError, match="lists 11 files"):
        open_pack(pack)
    (pack / "digests").write_text(text + text.splitlines()[-1] + "\n")
    with pytest.raises(FormatError, match="second time"):
        open_pack(pack)

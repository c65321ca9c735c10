"""Packing: every byte of the source where the format says it is, and clear refusals of what cannot be packed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import blake3
import gguf
import numpy as np
import pytest

from gguf_fixtures import write_moe_gguf
from leanmoe.errors import FormatError, UnsupportedError, UsageError
from leanmoe.formats.gguf import read_gguf
from leanmoe.pack import (
    Pack,
    default_output,
    expert_layouts,
    is_expert_tensor,
    open_pack,
    pack_gguf,
    summarize,
)


def tensor_bytes(reader: gguf.GGUFReader, name: str) -> np.ndarray:
    return next(t for t in reader.tensors if t.name == name).data


def section_bytes(pack: Pack, layer: int, expert: int, name: str) -> bytes:
    layout = next(m.layout for m in pack.manifest.layers if m.layer == layer)
    section = layout.sections[name]
    data = pack.expert_path(layer, expert).read_bytes()
    assert len(data) == layout.file_bytes
    return data[section.offset : section.offset + section.nbytes]


def tree(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("extras", [False, True])
def test_each_expert_file_has_its_experts_bytes(tmp_path: Path, extras: bool) -> None:
    """An expert would be computed with another's weights."""
    types = {
        0: {"gate": "Q8_0", "up": "Q4_0", "down": "Q5_1"},
        1: {"gate": "F32", "up": "Q8_0", "down": "Q4_1"},
    }
    source = write_moe_gguf(tmp_path / "m.gguf", extras=extras, types=lambda layer, part: types[layer][part])
    pack = open_pack(pack_gguf(source, tmp_path / "m.lmpack"))
    reader = gguf.GGUFReader(source)
    suffixes = {"": "weight", "_bias": "bias", "_scale": "scale"} if extras else {"": "weight"}
    for layer in (0, 1):
        sections = next(m.layout.sections for m in pack.manifest.layers if m.layer == layer)
        assert len(sections) == 3 * len(suffixes)
        for part in ("gate", "up", "down"):
            assert sections[part].qtype.name == types[layer][part]
            assert sections[part].shape == ((64, 32) if part == "down" else (32, 64))
            for suffix, kind in suffixes.items():
                stacked = tensor_bytes(reader, f"blk.{layer}.ffn_{part}_exps.{kind}")
                for expert in range(4):
                    assert section_bytes(pack, layer, expert, part + suffix) == stacked[expert].tobytes()
        for section in sections.values():
            assert section.offset % 64 == 0
    for name in ("experts/000/003", "trunk.gguf"):
        assert os.path.getsize(pack.path / name) % 4096 == 0


def test_fused_gate_up_is_split_by_rows(tmp_path: Path) -> None:
    """Models with fused gate and up would compute nonsense."""
    source = write_moe_gguf(tmp_path / "m.gguf", fused=True, extras=True)
    pack = open_pack(pack_gguf(source, tmp_path / "m.lmpack"))
    reader = gguf.GGUFReader(source)
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        stacked = tensor_bytes(reader, f"blk.1.ffn_gate_up_exps.{kind}")
        for expert in range(4):
            assert section_bytes(pack, 1, expert, "gate" + suffix) == stacked[expert][:32].tobytes()
            assert section_bytes(pack, 1, expert, "up" + suffix) == stacked[expert][32:].tobytes()
    scales = tensor_bytes(reader, "blk.1.ffn_gate_up_exps.scale")
    assert (
        section_bytes(pack, 1, 2, "gate_scale")
        == section_bytes(pack, 1, 2, "up_scale")
        == scales[2].tobytes()
    )


def test_trunk_is_a_gguf_with_all_else(tmp_path: Path) -> None:
    """The trunk would not open in other tools, or lose a tensor or a key."""
    source = write_moe_gguf(tmp_path / "m.gguf", extras=True, dense_layers=(0,))
    pack = open_pack(pack_gguf(source, tmp_path / "m.lmpack"))
    theirs, ours = gguf.GGUFReader(source), gguf.GGUFReader(pack.path / "trunk.gguf")
    assert [m.layer for m in pack.manifest.layers] == [1]
    kept = [t for t in theirs.tensors if not is_expert_tensor(t.name)]
    assert [t.name for t in ours.tensors] == [t.name for t in kept]
    assert "blk.1.attn_k_b.weight" in [t.name for t in kept]  # three dimensions do not make an expert
    for a, b in zip(ours.tensors, kept, strict=True):
        assert (a.tensor_type, a.data_offset % 4096) == (b.tensor_type, 0)
        assert np.array_equal(a.data, b.data)
        assert tuple(a.shape) == tuple(b.shape)
    raw = read_gguf(source).raw_kv
    trunk_raw = dict(pack.trunk.raw_kv)
    assert ours.fields["general.alignment"].contents() == 4096
    del trunk_raw["general.alignment"]
    assert trunk_raw == raw


def test_an_existing_alignment_is_replaced(tmp_path: Path) -> None:
    """A trunk with two alignments, or a wrong one, would be misread."""
    source = write_moe_gguf(tmp_path / "m.gguf", alignment=64)
    assert read_gguf(source).metadata["general.alignment"] == 64
    pack = open_pack(pack_gguf(source, tmp_path / "m.lmpack"))
    assert pack.trunk.metadata["general.alignment"] == 4096
    assert all(t.offset % 4096 == 0 for t in pack.trunk.tensors.values())


def test_split_source_gives_the_same_pack_through_any_shard(tmp_path: Path) -> None:
    """A split download would pack differently, or only through its first file."""
    whole = pack_gguf(write_moe_gguf(tmp_path / "whole.gguf"), tmp_path / "whole.lmpack")
    write_moe_gguf(tmp_path / "m.gguf", split_max_tensors=6)
    wanted = {name: data for name, data in tree(whole).items() if name not in ("manifest.json", "digests")}
    packs = []
    for number, shard in enumerate(sorted(tmp_path.glob("m-*.gguf"))):
        packs.append(tree(pack_gguf(shard, tmp_path / f"{number}.lmpack")))
        assert packs[0] == packs[-1]
        assert {name: packs[-1][name] for name in wanted} == wanted
        assert default_output(shard) == tmp_path / "m.lmpack"


def test_dense_model_is_all_trunk(tmp_path: Path) -> None:
    """Dense models could not be packed."""
    source = write_moe_gguf(tmp_path / "m.gguf", experts=0)
    pack = open_pack(pack_gguf(source, tmp_path / "m.lmpack"))
    assert pack.manifest.layers == ()
    assert list(pack.trunk.tensors) == list(read_gguf(source).tensors)
    assert summarize(pack.path).experts == 0


def test_blocks_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    """They would be run as layers, or take up disk and memory."""
    source = write_moe_gguf(tmp_path / "m.gguf", layers=3, nextn=1)
    pack = open_pack(pack_gguf(source, tmp_path / "m.lmpack"))
    names = list(read_gguf(source).tensors)
    assert [m.layer for m in pack.manifest.layers] == [0, 1]
    assert list(pack.manifest.skipped) == [n for n in names if n.startswith("blk.2.")]
    assert not any(n.startswith("blk.2.") for n in pack.trunk.tensors)


def test_expert_used_count_may_be_a_list(tmp_path: Path) -> None:
    """Models with a top-k for each layer could not be packed."""
    source = write_moe_gguf(tmp_path / "m.gguf", keys={"qwen3moe.expert_used_count": [1, 3]})
    assert expert_layouts(read_gguf(source)).expert_used_count == 3


def test_header_only_manifest_is_that_of_the_pack(tmp_path: Path) -> None:
    """`lean plan` on a GGUF would show other numbers than on its pack."""
    source = write_moe_gguf(tmp_path / "m.gguf", extras=True)
    pack = open_pack(pack_gguf(source, tmp_path / "m.lmpack"))
    assert expert_layouts(read_gguf(source)) == pack.manifest
    assert pack.manifest.expert_bytes == sum(p.stat().st_size for p in (pack.path / "experts").rglob("*/*"))
    bare, packed = summarize(source), summarize(pack.path)
    assert (bare.parameters, bare.types, bare.trunk_bytes) == (
        packed.parameters,
        packed.types,
        packed.trunk_bytes,
    )
    assert bare.parameters == sum(int(t.n_elements) for t in gguf.GGUFReader(source).tensors)


def test_digests_are_a_b3sum_list_of_every_file(tmp_path: Path) -> None:
    """`b3sum -c digests` would not check the pack."""
    out = pack_gguf(write_moe_gguf(tmp_path / "m.gguf"), tmp_path / "m.lmpack")
    listed = {}
    for line in (out / "digests").read_text().splitlines():
        digest, name = line.split("  ")
        listed[name] = digest
    files = tree(out)
    del files["digests"]
    assert listed == {name: blake3.blake3(data).hexdigest() for name, data in files.items()}
    pack = open_pack(out)
    assert pack.expert_digest(1, 2).hex() == listed["experts/001/002"]
    assert pack.trunk_digest.hex() == listed["trunk.gguf"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"skip": ("blk.1.ffn_up_exps.weight",)}, "ffn_up_exps"),
        ({"keys": {"qwen3moe.expert_count": 5}}, "5"),
        ({"keys": {"qwen3moe.expert_count": 0}}, "expert_count is 0"),
        ({"keys": {"qwen3moe.expert_used_count": 9}}, "expert_used_count is 9"),
        ({"keys": {"qwen3moe.nextn_predict_layers": 2}}, "block_count"),
        ({"keys": {"qwen3moe.block_count": 1 << 20}, "experts": 0, "arch": "llama"}, None),
    ],
)
def test_inconsistent_models_are_refused(tmp_path: Path, changes: dict[str, Any], word: str | None) -> None:
    """A damaged model would be packed and then give wrong text."""
    source = write_moe_gguf(tmp_path / "m.gguf", **changes)
    if word is None:  # harmless keys of another architecture
        expert_layouts(read_gguf(source))
        return
    with pytest.raises(FormatError, match=word) as caught:
        pack_gguf(source, tmp_path / "m.lmpack")
    assert str(source) in str(caught.value)
    assert sorted(tmp_path.iterdir()) == [source]


def test_one_tensor_per_expert_is_refused_with_advice(tmp_path: Path) -> None:
    """Someone with an early Mixtral file would not learn what to do."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.ffn_gate.0.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="convert the model"):
        pack_gguf(tmp_path / "m.gguf", tmp_path / "m.lmpack")


def test_an_existing_pack_is_never_overwritten(tmp_path: Path) -> None:
    """A pack in use would be destroyed by a second `lean pack`."""
    source = write_moe_gguf(tmp_path / "m.gguf")
    out = pack_gguf(source, tmp_path / "m.lmpack")
    before = tree(out)
    with pytest.raises(UsageError, match="already"):
        pack_gguf(source, out)
    with pytest.raises(UsageError, match="already"):
        pack_gguf(source, out, consume=True)
    assert tree(out) == before
    assert source.exists()


def test_strange_partial_directories_are_left_alone(tmp_path: Path) -> None:
    """A directory of the user's that happens to have the name would be overwritten."""
    source = write_moe_gguf(tmp_path / "m.gguf")
    mine = tmp_path / "m.lmpack.partial" / "mine"
    mine.parent.mkdir()
    mine.write_text("keep")
    with pytest.raises(UsageError, match="delete it"):
        pack_gguf(source, tmp_path / "m.lmpack")
    assert mine.read_text() == "keep"


def test_opening_what_is_no_pack_says_what_to_do(tmp_path: Path) -> None:
    """A newcomer who passes the wrong path would see a puzzle."""
    source = write_moe_gguf(tmp_path / "m.gguf")
    (tmp_path / "a.lmpack.partial").mkdir()
    (tmp_path / "empty").mkdir()
    for path, words in {
        "m.gguf": "lean pack",
        "a.lmpack": "run lean pack again",
        "a.lmpack.partial": "run lean pack again",
        "b.lmpack": "no such pack",
    }.items():
        with pytest.raises(UsageError, match=words):
            open_pack(tmp_path / path)
    with pytest.raises(FormatError, match=r"manifest\.json"):
        open_pack(tmp_path / "empty")
    assert source.exists()


def test_memory_stays_small_while_packing(tmp_path: Path) -> None:
    """Packing would need as much memory as the model has bytes."""
    source = write_moe_gguf(tmp_path / "m.gguf", layers=2, experts=16, d=1024, f=512)
    nbytes = source.stat().st_size
    script = (
        "import resource, sys; from leanmoe.pack import pack_gguf;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10;"
        "before = peak(); pack_gguf(sys.argv[1], sys.argv[2]); print(peak() - before)"
    )
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "m.lmpack")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert nbytes > 50_000_000
    assert grown < 20_000_000


def test_manifest_is_plain_json_with_the_documented_fields(tmp_path: Path) -> None:
    """Other tools could not read a pack by its documentation."""
    source = write_moe_gguf(tmp_path / "m.gguf")
    out = pack_gguf(source, tmp_path / "m.lmpack")
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["architecture"]) == ("lmpack", 1, "qwen3moe")
    assert manifest["source"]["files"][0]["bytes"] == source.stat().st_size
    assert manifest["layers"][1]["sections"]["down"]["type"] == "Q8_0"


def test_a_file_of_holes_is_not_packed_as_zeros(tmp_path: Path) -> None:
    """A header alone, or a download that reserved its room, became a pack of zeros without complaint."""
    source = write_moe_gguf(tmp_path / "m.gguf", experts=16, layers=16)
    gguf = read_gguf(source)
    nbytes = source.stat().st_size
    assert nbytes > 1 << 20
    os.truncate(source, gguf.data_starts[0])
    os.truncate(source, nbytes)
    with pytest.raises(FormatError, match=r"m\.gguf: of its .* on the disk"):
        pack_gguf(source, tmp_path / "m.lmpack")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]

"""`lean export`: a pack becomes the GGUF again that it could have been made from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gguf_fixtures import write_moe_gguf
from leanmoe.cli.main import app
from leanmoe.errors import FormatError, UsageError
from leanmoe.formats.gguf import GGUFFile, read_gguf
from leanmoe.pack import export_gguf, open_pack, pack_gguf

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases and scales": {"extras": True},
    "types by layer": {"types": lambda layer, part: ("Q8_0", "Q4_0")[layer % 2] if part == "down" else "F32"},
    "split": {"split_max_tensors": 5},
    "dense layers": {"layers": 3, "dense_layers": (0,)},
    "dense": {"experts": 0},
    "wide alignment": {"alignment": 128},
}


def data(gguf: GGUFFile, name: str) -> bytes:
    tensor = gguf.tensors[name]
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.nbytes)


def plain(metadata: Any) -> dict[str, Any]:
    return {
        key: value.tolist()
        if isinstance(value, np.ndarray)
        else list(value)
        if hasattr(value, "__len__")
        else value
        for key, value in metadata.items()
        if not key.startswith("split.") and key != "general.alignment"
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exported_pack_has_the_tensors_of_its_source_and_packs_the_same(
    variant: str, tmp_path: Path
) -> None:
    """What went into a pack could not be got out of it again."""
    source = read_gguf(write_moe_gguf(tmp_path / "m.gguf", **VARIANTS[variant]))
    pack = pack_gguf(source.path, tmp_path / "m.lmpack")
    back = read_gguf(export_gguf(pack, tmp_path / "back.gguf"))
    assert sorted(back.tensors) == sorted(source.tensors)
    for name, tensor in source.tensors.items():
        assert (back.tensors[name].qtype, back.tensors[name].shape) == (tensor.qtype, tensor.shape)
        assert data(back, name) == data(source, name)
    assert plain(back.metadata) == plain(source.metadata)
    again = open_pack(pack_gguf(back.path, tmp_path / "again.lmpack"))
    ours, theirs = dict(open_pack(pack).digests), dict(again.digests)
    del ours["manifest.json"], theirs["manifest.json"]  # these name their sources
    assert ours == theirs


def test_fused_experts_come_out_as_gate_and_up(tmp_path: Path) -> None:
    source = read_gguf(write_moe_gguf(tmp_path / "m.gguf", fused=True))
    back = read_gguf(export_gguf(pack_gguf(source.path, tmp_path / "m.lmpack"), tmp_path / "back.gguf"))
    both = data(source, "blk.1.ffn_gate_up_exps.weight")
    experts = 4
    halves = np.frombuffer(both, np.uint8).reshape(experts, 2, -1)
    assert data(back, "blk.1.ffn_gate_exps.weight") == halves[:, 0].tobytes()
    assert data(back, "blk.1.ffn_up_exps.weight") == halves[:, 1].tobytes()


def test_blocks_that_the_pack_left_out_are_not_counted(tmp_path: Path) -> None:
    """llama.cpp would ask for the tensors of a block that is not there."""
    source = write_moe_gguf(tmp_path / "m.gguf", layers=3, nextn=1, keys={"qwen3moe.per_layer": [7, 8, 9]})
    pack = pack_gguf(source, tmp_path / "m.lmpack")
    back = read_gguf(export_gguf(pack, tmp_path / "back.gguf"))
    assert back.metadata["qwen3moe.block_count"] == 2
    assert back.metadata["qwen3moe.nextn_predict_layers"] == 0
    assert list(back.metadata["qwen3moe.per_layer"]) == [7, 8]
    assert not any(name.startswith("blk.2.") for name in back.tensors)
    pack_gguf(back.path, tmp_path / "again.lmpack")


@pytest.mark.parametrize("name", ["trunk.gguf", "experts/001/002"])
def test_a_damaged_pack_is_not_exported(name: str, tmp_path: Path) -> None:
    """A file that looks whole would hold damaged weights."""
    pack = pack_gguf(write_moe_gguf(tmp_path / "m.gguf"), tmp_path / "m.lmpack")
    raw = bytearray((pack / name).read_bytes())
    raw[-4200 if name == "trunk.gguf" else 100] ^= 1
    (pack / name).write_bytes(raw)
    with pytest.raises(FormatError, match=f"{name}: does not match its digest"):
        export_gguf(pack, tmp_path / "back.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "m.lmpack"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    """A mistyped name would cost a model."""
    source = write_moe_gguf(tmp_path / "m.gguf")
    pack = pack_gguf(source, tmp_path / "m.lmpack")
    with pytest.raises(UsageError, match="already exists"):
        export_gguf(pack, source)
    result = CliRunner().invoke(app, ["export", str(pack), str(tmp_path / "back.gguf")])
    assert (result.exit_code, result.stdout.strip()) == (0, str(tmp_path / "back.gguf"))


def test_two_exports_at_once_do_not_write_one_file(tmp_path: Path) -> None:
    """The second would empty what the first is about to give its name."""
    pack = pack_gguf(write_moe_gguf(tmp_path / "m.gguf"), tmp_path / "m.lmpack")
    out, refused = tmp_path / "back.gguf", []

    def again(_: object) -> None:
        if not refused:
            with pytest.raises(UsageError, match="another lean export is writing it") as error:
                export_gguf(pack, out)
            refused.append(error)

    export_gguf(pack, out, progress=again)
    assert refused
    other = export_gguf(pack, tmp_path / "other.gguf")
    assert out.read_bytes() == other.read_bytes()


def test_what_another_made_meanwhile_is_kept(tmp_path: Path) -> None:
    pack = pack_gguf(write_moe_gguf(tmp_path / "m.gguf"), tmp_path / "m.lmpack")
    out = tmp_path / "back.gguf"
    with pytest.raises(UsageError, match="made meanwhile"):
        export_gguf(pack, out, progress=lambda _: out.write_text("mine"))
    assert out.read_text() == "mine"
    assert not out.with_name("back.gguf.partial").exists()

"""Checkpoints as they are published: in 8 bits, fused or by expert, damaged, with tokenizers of every kind."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from leanmoe.convert import CheckpointSource
from leanmoe.convert.mixture import Shape, find_recipe, storage_types
from leanmoe.errors import FormatError, LeanError, UnsupportedError, UsageError
from leanmoe.formats.quant_types import BY_NAME
from leanmoe.pack import open_pack, pack_source
from oracles.checkpoint import tiny_checkpoint

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Qwen3-MoE in BF16, each expert by itself. Copied by those that change it."""
    folder = tmp_path_factory.mktemp("published") / "tiny"
    return tiny_checkpoint(folder, "qwen3moe", dtype="bfloat16", wide=True).path


def changed(published: Path, folder: Path, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """A copy of the checkpoint with other tensors, and other values in its configuration."""
    folder.mkdir()
    for path in published.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(change(load_file(published / "model.safetensors")), folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def digests(source: CheckpointSource, out: Path) -> dict[str, bytes]:
    found = dict(open_pack(pack_source(source, out)).digests)
    del found["manifest.json"]  # it names the source
    return found


def test_fused_experts_and_single_ones_make_the_same_pack(published: Path, tmp_path: Path) -> None:
    """The same model is published both ways, and halves of a fused tensor are easily mistaken for each other."""

    def fuse(tensors: Tensors) -> Tensors:
        fused = {name: value for name, value in tensors.items() if ".experts." not in name}
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors[f"{prefix}.{expert}.{part}_proj.weight"] for expert in range(8)])
                for part in ("gate", "up", "down")
            )
            fused[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
            fused[f"{prefix}.down_proj"] = down
        return fused

    fused = changed(published, tmp_path / "fused", fuse)
    for quant in (None, "q4_k_m"):
        want = digests(CheckpointSource(published, quant, name="m"), tmp_path / f"want-{quant}.lmpack")
        assert digests(CheckpointSource(fused, quant, name="m"), tmp_path / f"got-{quant}.lmpack") == want


@pytest.mark.parametrize("scales", ["blocks", "rows", "one"])
def test_fp8_weights_are_multiplied_with_their_scales(scales: str, published: Path, tmp_path: Path) -> None:
    """DeepSeek and others publish 8 bits only; a scale at the wrong place makes noise of the model."""
    want: Tensors = {}
    rng = torch.Generator().manual_seed(1)

    def to_fp8(tensors: Tensors) -> Tensors:
        out = dict(tensors)
        for name, value in tensors.items():
            if value.dim() != 2 or "proj" not in name:
                continue
            rows, columns = value.shape
            if scales == "blocks":  # of 96 x 64: neither divides every matrix here
                high, wide = 96, 64
            else:
                high, wide = (1, columns) if scales == "rows" else (rows, columns)
            scale = 0.5 + torch.rand((-(-rows // high), -(-columns // wide)), generator=rng)
            spread = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
            eight = (value.float() / spread).to(torch.float8_e4m3fn)
            want[name] = eight.float() * spread
            out[name] = eight
            stored = scale.reshape(1) if scales == "one" else scale
            out[name + ("_scale_inv" if scales == "blocks" else "_scale")] = stored
            out[name.replace("weight", "input_scale")] = torch.ones(1)
        return out

    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [96, 64]}}
    folder = changed(published, tmp_path / "fp8", to_fp8, **settings)
    pack = open_pack(pack_source(CheckpointSource(folder, "f32"), tmp_path / "m.lmpack"))
    trunk = pack.trunk.tensors["blk.1.attn_q.weight"]
    raw = np.fromfile(trunk.path, np.float32, count=trunk.nbytes // 4, offset=trunk.offset)
    np.testing.assert_array_equal(raw.reshape(trunk.shape), want["model.layers.1.self_attn.q_proj.weight"])
    data = pack.expert_path(1, 5).read_bytes()
    for part, section in pack.manifest.layers[1].layout.sections.items():
        got = np.frombuffer(data, np.float32, section.nbytes // 4, section.offset).reshape(section.shape)
        np.testing.assert_array_equal(got, want[f"model.layers.1.mlp.experts.5.{part}_proj.weight"])


def test_bf16_is_kept_bit_for_bit_where_nothing_is_asked(published: Path, tmp_path: Path) -> None:
    pack = open_pack(pack_source(CheckpointSource(published), tmp_path / "m.lmpack"))
    tensor = pack.trunk.tensors["output.weight"]
    assert tensor.qtype.name == "BF16"
    raw = np.fromfile(tensor.path, np.int16, count=tensor.nbytes // 2, offset=tensor.offset)
    want = load_file(published / "model.safetensors")["lm_head.weight"].view(torch.int16).numpy()
    np.testing.assert_array_equal(raw.reshape(want.shape), want)


def _types(quant: str, layers: int, experts: int, width: int = 256, tied: bool = False) -> dict[str, str]:
    shapes = {"token_embd.weight": (1000, 512), "output_norm.weight": (512,)}
    shapes |= {} if tied else {"output.weight": (1000, 512)}
    for n in range(layers):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{n}.{part}.weight"] = (512, 512)
        shapes[f"blk.{n}.attn_norm.weight"] = (512,)
        shapes[f"blk.{n}.ffn_gate_inp.weight"] = (experts, 512)
        shapes[f"blk.{n}.ffn_gate_exps.weight"] = (experts, width, 512)
        shapes[f"blk.{n}.ffn_down_exps.weight"] = (experts, 512, width)
    tensors = {name: Shape(shape, BY_NAME["BF16"]) for name, shape in shapes.items()}
    found = storage_types(find_recipe(quant), tensors, layers, experts)
    return {name: kind.name for name, kind in found.items()}


def test_q4_k_m_is_the_mixture_that_llama_quantize_makes() -> None:
    """A file with this name is expected to have this size and this quality everywhere."""
    types = _types("Q4_K_M", 16, 64)
    better = [0, 1, 4, 7, 10, 13, 14, 15]  # the first and last eighth, and every third between
    for part in ("ffn_down_exps", "attn_v"):
        assert [n for n in range(16) if types[f"blk.{n}.{part}.weight"] == "Q6_K"] == better
        assert types[f"blk.2.{part}.weight"] == "Q4_K"
    assert types["output.weight"] == "Q6_K"
    assert {types[f"blk.3.{p}.weight"] for p in ("attn_q", "attn_k", "attn_output", "ffn_gate_exps")} == {
        "Q4_K"
    }
    assert types["token_embd.weight"] == "Q4_K"
    assert {types["output_norm.weight"], types["blk.0.ffn_gate_inp.weight"]} == {"F32"}
    assert _types("q4_k_m", 16, 64, tied=True)["token_embd.weight"] == "Q6_K"
    narrow = _types("q4_k_m", 16, 64, width=288)
    assert (narrow["blk.0.ffn_down_exps.weight"], narrow["blk.2.ffn_down_exps.weight"]) == ("Q8_0", "Q5_0")
    assert _types("q4_k_m", 16, 64, width=40)["blk.2.ffn_down_exps.weight"] == "F16"


def test_eight_experts_get_better_attention() -> None:
    """Mixtral's own rules."""
    types = _types("q4_k_m", 8, 8)
    wanted = {"attn_v": "Q8_0", "attn_k": "Q8_0", "attn_output": "Q5_K", "attn_q": "Q4_K"}
    assert {part: types[f"blk.2.{part}.weight"] for part in wanted} == wanted


def test_other_mixtures() -> None:
    small = _types("q4_k_s", 16, 64)
    assert [n for n in range(16) if small[f"blk.{n}.ffn_down_exps.weight"] == "Q5_K"] == [0, 1]
    assert [n for n in range(16) if small[f"blk.{n}.attn_v.weight"] == "Q5_K"] == [0, 1, 2, 3]
    assert _types("q5_k_m", 16, 64)["blk.0.attn_v.weight"] == "Q6_K"
    assert set(_types("q8_0", 4, 64).values()) == {"Q8_0", "F32"}
    assert set(_types("q6_k", 4, 64).values()) == {"Q6_K", "F32"}
    assert set(_types("bf16", 4, 64).values()) == {"BF16", "F32"}
    with pytest.raises(UsageError, match="q4_k_m"):
        find_recipe("Q4_K_XXL")


def _without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def _with(name: str, value: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: value}


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (_without("model.layers.1.mlp.experts.3.up_proj.weight"), {}, r"no tensor '.*experts\.3\.up_proj"),
        (_with("model.layers.0.surprise.weight", torch.ones(3)), {}, r"surprise.*not known"),
        (_with("model.layers.0.mlp.experts.3.up_proj.weight", torch.ones(3, 4)), {}, "differ in shape"),
        (_with("lm_head.weight", torch.zeros((288, 256), dtype=torch.int32)), {}, "stored as I32"),
        (_with("lm_head.weight", torch.full((288, 256), torch.nan)), {}, r"output\.weight.*not finite"),
        (dict, {"model_type": "frobnicate"}, "'frobnicate' cannot be converted"),
        (dict, {"num_hidden_layers": 3}, "tensors are of 2 layers"),
        (dict, {"num_attention_heads": "four"}, "num_attention_heads is 'four'"),
        (dict, {"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        (dict, {"norm_topk_prob": False}, "norm_topk_prob"),
        (dict, {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "rope_type 'su'"),
    ],
)
def test_a_checkpoint_that_would_make_another_model_is_refused(
    change: Callable[[Tensors], Tensors], config: dict[str, Any], words: str, published: Path, tmp_path: Path
) -> None:
    """It would be packed without complaint and answer nonsense."""
    folder = changed(published, tmp_path / "odd", change, **config)
    with pytest.raises(LeanError, match=words):
        pack_source(CheckpointSource(folder, "q4_0"), tmp_path / "m.lmpack")


def test_damaged_files_are_named(published: Path, tmp_path: Path) -> None:
    """A download that broke off would end in a traceback, or in a pack of half a model."""
    folder = changed(published, tmp_path / "odd", dict)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    taken = header["model.norm.weight"]["data_offsets"][0]
    bad = [b"", whole[:5], whole[: 8 + length // 2], whole[:-1], struct.pack("<Q", 1 << 60) + whole[8:]]
    for entry in (
        {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]},
        {"dtype": "BF16", "shape": [1 << 40], "data_offsets": [0, 2 << 40]},
        {"dtype": "BF16", "shape": [-1], "data_offsets": [0, -2]},
        {"dtype": "BF16", "shape": [4], "data_offsets": [0, 4]},
        {"dtype": "BF16", "shape": [2], "data_offsets": [taken, taken + 4]},  # over another tensor
        {"shape": [4]},
        7,
    ):
        raw = json.dumps(header | {"lm_head.weight": entry}).encode()
        bad.append(struct.pack("<Q", len(raw)) + raw + whole[8 + length :])
    for raw in bad:
        weights.write_bytes(raw)
        with pytest.raises(FormatError, match=r"model\.safetensors"):
            CheckpointSource(folder)
    weights.write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    for value in (
        {},
        {"weight_map": {"a": "../m.safetensors"}},
        {"weight_map": {"a": "gone.safetensors"}},
        [],
    ):
        index.write_text(json.dumps(value))
        with pytest.raises(FormatError):
            CheckpointSource(folder)
    index.unlink()
    for name, text in {
        "config.json": "{",
        "tokenizer.json": '{"model": 3}',
        "tokenizer_config.json": "[]",
    }.items():
        kept = (folder / name).read_bytes()
        (folder / name).write_text(text)
        with pytest.raises(FormatError, match=name.replace(".", r"\.")):
            CheckpointSource(folder)
        (folder / name).write_bytes(kept)
    CheckpointSource(folder)
    with pytest.raises(UsageError, match="no such file"):
        CheckpointSource(tmp_path)


def test_consume_is_refused(published: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="GGUF"):
        pack_source(CheckpointSource(published), tmp_path / "m.lmpack", consume=True)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_without_a_known_word_split_is_refused(published: Path, tmp_path: Path) -> None:
    """Text would be cut into other tokens than the model was trained with, and its answers would be worse."""
    folder = changed(published, tmp_path / "odd", dict)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": "e"},
        "behavior": "Isolated",
        "invert": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedError, match="no GGUF name"):
        CheckpointSource(folder)

"""Checkpoints in safetensors format, packed: the same model as transformers runs, and as llama.cpp would convert it."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from leanmoe import LLM
from leanmoe.convert import CheckpointSource
from leanmoe.pack import export_gguf, pack_source, verify_pack
from oracles.tiny_families import ARCHITECTURES, gpt_oss_rope

# llama.cpp rounds the bounds of gpt-oss's YaRN to whole pairs, and ranks DeepSeek-V2's groups of experts by the sum of
# the best two, whatever the model was trained with.
LLAMA_CPP: dict[str, dict[str, Any]] = {
    "gpt-oss": {"rope_parameters": gpt_oss_rope(whole_pairs=True)},
    "deepseekv2": {"topk_method": "greedy"},
}
TOKENS = Random(7).choices(range(280), k=64)
Packed = tuple[Any, Path]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Packed]:
    """Saves a tiny checkpoint and packs it, once for each set of arguments."""
    from oracles.checkpoint import tiny_checkpoint

    made: dict[str, Packed] = {}

    def make(arch: str, quant: str | None = None, **options: Any) -> Packed:
        key = f"{arch} {quant} {sorted(options.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp("convert")
            tiny = tiny_checkpoint(folder / "tiny", arch, **options)
            made[key] = tiny, pack_source(CheckpointSource(tiny.path, quant), folder / "tiny.lmpack")
        return made[key]

    return make


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_packed_checkpoint_has_the_logits_of_transformers(arch: str, packed: Callable[..., Packed]) -> None:
    """A tensor that is misnamed, transposed or re-ordered wrongly would make another model."""
    from oracles import hf

    tiny, path = packed(arch)
    want = hf.logits(tiny.hf_model, TOKENS)
    with LLM(path, kv_type="f32") as llm:
        got = llm.logits(TOKENS).numpy()
    assert np.abs(got - want).max() <= 1e-3 * want.std()
    assert verify_pack(path) == []


def test_a_checkpoint_that_also_sees_and_predicts_is_packed_as_its_text_model(
    packed: Callable[..., Packed], tmp_path: Path
) -> None:
    """Qwen3.5 is published with a vision tower and blocks for multi-token prediction, its text model inside."""
    import json

    from safetensors.torch import load_file, save_file

    from oracles.checkpoint import tiny_checkpoint

    folder = tiny_checkpoint(tmp_path / "tiny", "qwen35moe").path
    stored = load_file(folder / "model.safetensors")
    inner = {name.replace("model.", "model.language_model."): value for name, value in stored.items()}
    extra = {
        "model.visual.blocks.0.norm1.weight": stored["model.norm.weight"].clone(),
        "mtp.layers.0.input_layernorm.weight": stored["model.norm.weight"].clone(),
        "mtp.fc.weight": stored["lm_head.weight"].clone(),
    }
    save_file(inner | extra, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    with LLM(packed("qwen35moe")[1]) as llm:
        want = llm.logits(TOKENS)
    with LLM(pack_source(CheckpointSource(folder), tmp_path / "tiny.lmpack")) as llm:
        assert (llm.logits(TOKENS) == want).all()


def test_the_mxfp4_experts_of_gpt_oss_keep_their_numbers(tmp_path: Path) -> None:
    """Their blocks are laid out anew, and a number in the wrong place or half would make nonsense."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from leanmoe.kernels import dequantize
    from leanmoe.pack import open_pack
    from oracles.checkpoint import tiny_checkpoint

    folder = tiny_checkpoint(tmp_path / "tiny", "gpt-oss", num_hidden_layers=1).path
    stored, want = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(3)
    for name in ("gate_up_proj", "down_proj"):
        full = f"model.layers.0.mlp.experts.{name}"
        experts, inputs, outputs = stored.pop(full).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 130, shape, generator=generator, dtype=torch.uint8)
        stored[f"{full}_blocks"], stored[f"{full}_scales"] = blocks, scales
        want[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, in, out]
    save_file(stored, folder / "model.safetensors")
    pack = open_pack(pack_source(CheckpointSource(folder), tmp_path / "tiny.lmpack"))
    for expert in range(8):
        data = torch.frombuffer(bytearray(pack.expert_path(0, expert).read_bytes()), dtype=torch.uint8)
        got = {
            name: dequantize(data[s.offset : s.offset + s.nbytes], s.qtype, s.shape)
            for name, s in pack.manifest.layers[0].layout.sections.items()
            if s.qtype.name == "MXFP4"
        }
        assert torch.equal(got["gate"], want["gate_up_proj"][expert].T[::2])
        assert torch.equal(got["up"], want["gate_up_proj"][expert].T[1::2])
        assert torch.equal(got["down"], want["down_proj"][expert].T)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_llama_cpp_loads_what_lean_exports_with_the_same_logits(
    arch: str, packed: Callable[..., Packed], tmp_path: Path
) -> None:
    """A model that lean converted could be used nowhere else."""
    from oracles import hf
    from oracles.llama_cpp import LlamaCpp

    tiny, path = packed(arch, **LLAMA_CPP.get(arch, {}))
    want = hf.logits(tiny.hf_model, TOKENS)
    exported = export_gguf(path, tmp_path / "tiny.gguf")
    with LlamaCpp(exported, n_ctx=256, kv="f32", flash_attention=False) as model:
        got = model.logits(TOKENS)
        text = "The thing and the rest: naïve 東京 12345\n\tx += 1"
        assert model.text(model.tokenize(text)) == text
    assert np.abs(got - want).max() <= 1e-3 * want.std()


@pytest.mark.parametrize("arch", ["qwen3moe", "mixtral", "qwen2"])
@pytest.mark.parametrize("quant", ["q8_0", "q4_k_m", "q5_k_m", "q6_k"])
def test_a_quantised_checkpoint_is_still_the_same_model(
    arch: str, quant: str, packed: Callable[..., Packed], tmp_path: Path
) -> None:
    """Wrong scales or a wrong type for one tensor would only show as a model that has become dull."""
    from oracles import hf
    from oracles.llama_cpp import LlamaCpp, kl_and_top1

    tiny, path = packed(arch, quant, wide=True)
    want = hf.logits(tiny.hf_model, TOKENS)
    with LLM(path) as llm:
        got = llm.logits(TOKENS).numpy()
    with LlamaCpp(export_gguf(path, tmp_path / "tiny.gguf"), n_ctx=256) as model:
        other = model.logits(TOKENS)
    limit = {"q8_0": 1e-3, "q6_k": 3e-3, "q5_k_m": 1e-2, "q4_k_m": 4e-2}[quant]
    assert kl_and_top1(want, got).mean_kl <= limit
    assert kl_and_top1(other, got).mean_kl <= 2e-3


def test_the_tokenizer_of_gemma_4_gives_the_same_ids(tmp_path: Path) -> None:
    """Its merges are of characters, not bytes, with a mark for spaces, and rare characters fall apart into bytes."""
    import json

    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    from leanmoe.convert.config import Config
    from leanmoe.convert.tokenizer import tokenizer_metadata
    from leanmoe.text import Tokenizer as Ours

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|tool_call>", "<turn|>"]
    merges = [("e", "r"), ("▁", "t"), ("▁t", "h"), ("▁th", "er"), ("a", "b"), ("\n", "\n"), ("▁", "▁")]
    texts = special + [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abehrt\n")
    texts += [left + right for left, right in merges]
    model = models.BPE(
        {text: token for token, text in enumerate(texts)}, merges, unk_token="<unk>", byte_fallback=True
    )
    own = Tokenizer(model)
    own.normalizer = normalizers.Replace(" ", "▁")
    own.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_previous")
    own.add_special_tokens(special)
    own.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    config = Config({"vocab_size": len(texts)}, "config.json")
    metadata = tokenizer_metadata(tmp_path, config, ("gemma4",))
    ours = Ours.from_metadata(metadata)
    for text in (" there the  aber\n\n\nat", "é 日本 🦙", "\n", "<turn|>ab<|tool_call> t"):
        assert ours.encode(text) == [2, *own.encode(text).ids]
        assert ours.decode(ours.encode(text, add_special=False)) == text
    assert ours.is_control(5)
    assert not ours.is_control(4)

"""Packing a checkpoint streams: what it holds in memory depends on neither the model's size nor its largest tensor."""

import json
import struct
import sys
from pathlib import Path

import pytest

from cgroup import memory_limit
from leanmoe.pack import open_pack
from oracles.checkpoint import save_tokenizer

HIDDEN, WIDTH, EXPERTS, LAYERS, VOCAB = 2048, 1024, 64, 4, 32000
CONFIG = dict(
    model_type="qwen3_moe",
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    moe_intermediate_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=EXPERTS,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    vocab_size=VOCAB,
    tie_word_embeddings=False,
)


def write_sparse_checkpoint(folder: Path) -> int:
    """A checkpoint of zeros, which take no room on the disk; the bytes of its largest tensor."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        parts = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (2048, HIDDEN),
            "self_attn.k_proj.weight": (512, HIDDEN),
            "self_attn.v_proj.weight": (512, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, 2048),
            "self_attn.q_norm.weight": (128,),
            "self_attn.k_norm.weight": (128,),
            "mlp.gate.weight": (EXPERTS, HIDDEN),
            "mlp.experts.gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN),
            "mlp.experts.down_proj": (EXPERTS, HIDDEN, WIDTH),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    header, end, largest = {}, 0, 0
    for name, shape in shapes.items():
        nbytes = 2
        for n in shape:
            nbytes *= n
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end, largest = end + nbytes, max(largest, nbytes)
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_tokenizer(folder)
    return largest


@pytest.mark.slow
@pytest.mark.cgroup
def test_a_checkpoint_of_gigabytes_is_packed_within_the_memory_of_one_tensor(tmp_path: Path) -> None:
    """A checkpoint of hundreds of gigabytes could only be packed where there is as much memory."""
    folder = tmp_path / "big"
    folder.mkdir()
    largest = write_sparse_checkpoint(folder)
    limit = 560 << 20
    assert largest >= 512 << 20  # so within the limit there is no room for this tensor and the interpreter
    assert (folder / "model.safetensors").stat().st_size > 5 * limit
    with memory_limit(limit) as group:
        done = group.run([sys.executable, "-m", "leanmoe", "pack", str(folder), "--quant", "q4_k_m"])
        assert done.returncode == 0, done.stderr
        assert group.killed() == 0
    assert open_pack(tmp_path / "big.lmpack").manifest.expert_files == LAYERS * EXPERTS

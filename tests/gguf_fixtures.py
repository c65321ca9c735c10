"""Small GGUF files with random weights, written by the `gguf` package's writer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from leanmoe.formats.quant_types import quant_type

VOCAB = 64


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], type_name: str) -> np.ndarray:
    """Random bytes for a tensor of torch `shape` and that type; the last dimension is a row's bytes."""
    row = quant_type(type_name).row_bytes(shape[-1])
    return rng.integers(0, 256, size=(*shape[:-1], row), dtype=np.uint8)


def write_moe_gguf(
    path: Path,
    *,
    arch: str = "qwen3moe",
    layers: int = 2,
    experts: int = 4,
    used: int = 2,
    d: int = 64,
    f: int = 32,
    types: Callable[[int, str], str] = lambda layer, part: "Q8_0",
    fused: bool = False,
    extras: bool = False,
    dense_layers: tuple[int, ...] = (),
    nextn: int = 0,
    split_max_tensors: int = 0,
    alignment: int = 0,
    seed: int = 0,
    keys: Mapping[str, Any] | None = None,
    skip: tuple[str, ...] = (),
) -> Path:
    """Writes a small model and returns the path of its first file.

    `types(layer, part)` names the type of each expert tensor. `extras` adds biases and scales to the experts.
    `skip` leaves out tensors by name; `keys` adds or replaces integer keys.
    """
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, arch, split_max_tensors=split_max_tensors)
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_name("tiny")
    numbers = {
        f"{arch}.block_count": layers,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": d,
        f"{arch}.expert_count": experts,
        f"{arch}.expert_used_count": used,
    }
    if nextn:
        numbers[f"{arch}.nextn_predict_layers"] = nextn
    for key, value in (numbers | dict(keys or {})).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["t", "o", "to", *(f"tøken{i}" for i in range(3, VOCAB))])
    writer.add_token_merges(["t o"])
    writer.add_token_types([1] * VOCAB)
    writer.add_chat_template("{{ messages }}")

    def floats(name: str, *shape: int) -> None:
        if name not in skip:
            writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32))

    def blocks(name: str, type_name: str, *shape: int) -> None:
        if name in skip:
            return
        if type_name == "F32":
            floats(name, *shape)
        else:
            raw = random_blocks(rng, shape, type_name)
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[type_name])

    floats("token_embd.weight", VOCAB, d)
    floats("output_norm.weight", d)
    for n in range(layers):
        floats(f"blk.{n}.attn_norm.weight", d)
        blocks(f"blk.{n}.attn_q.weight", "Q8_0", d, d)
        floats(f"blk.{n}.attn_k_b.weight", 2, 3, 4)  # three dimensions, but no expert
        if n >= layers - nextn:
            floats(f"blk.{n}.nextn.eh_proj.weight", d, 2 * d)
        if n in dense_layers or not experts:
            blocks(f"blk.{n}.ffn_down.weight", "Q8_0", d, f)
            continue
        floats(f"blk.{n}.ffn_gate_inp.weight", experts, d)
        name = f"blk.{n}.ffn_{{}}_exps.{{}}".format
        if fused:
            blocks(name("gate_up", "weight"), types(n, "gate"), experts, 2 * f, d)
        else:
            blocks(name("gate", "weight"), types(n, "gate"), experts, f, d)
            blocks(name("up", "weight"), types(n, "up"), experts, f, d)
        blocks(name("down", "weight"), types(n, "down"), experts, d, f)
        if extras:
            for part, rows in (
                (("gate_up", 2 * f), ("down", d)) if fused else (("gate", f), ("up", f), ("down", d))
            ):
                floats(name(part, "bias"), experts, rows)
                floats(name(part, "scale"), experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))[0]

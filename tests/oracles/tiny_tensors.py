"""The tensors of a tiny model's file, and the parameters of the transformers model that they come from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch

from oracles.quantise import dequantise, quantise, storage_type
from oracles.tiny_families import Family


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file and the parameter (or part of one) that it comes from."""

    name: str
    source: torch.Tensor
    rows: torch.Tensor | None = None  # the file's row i is the parameter's row rows[i]
    columns: torch.Tensor | None = None
    changed: str = ""  # "+1" or "-exp": what the file holds of each number

    def write(self, writer: gguf.GGUFWriter, quant: str) -> None:
        """Add it to a file whose matrices are of type `quant`."""
        kind = "F32" if self._stays_f32() else storage_type(quant, self.source.shape[-1])
        stored = self._to_file()
        data = quantise(stored.contiguous().numpy(), kind)
        if kind == "F32":
            writer.add_tensor(self.name, data.view(np.float32))
        else:
            writer.add_tensor(self.name, data, raw_dtype=gguf.GGMLQuantizationType[kind])

    def read(self, stored: gguf.ReaderTensor) -> None:
        """Put into the transformers model exactly the values that a file holds."""
        data = np.ascontiguousarray(stored.data).view(np.uint8)
        self._from_file(torch.from_numpy(dequantise(data, stored.tensor_type.name)))

    def _stays_f32(self) -> bool:
        vector = self.source.ndim == 1 or self.name.endswith(".bias")
        return vector or "ffn_gate_inp" in self.name or "conv1d" in self.name

    def _to_file(self) -> torch.Tensor:
        value = self.source if self.rows is None else self.source[self.rows]
        value = value if self.columns is None else value[:, self.columns]
        return {"": lambda: value, "+1": lambda: value + 1, "-exp": lambda: -value.exp()}[self.changed]()

    def _from_file(self, value: torch.Tensor) -> None:
        value = {"": lambda: value, "+1": lambda: value - 1, "-exp": lambda: (-value).log()}[self.changed]()
        if self.columns is not None:
            value = value[:, self.columns.argsort()]
        if self.rows is None:
            self.source.copy_(value)
        else:
            self.source[self.rows] = value


def _interleaved(heads: int, rows: int) -> torch.Tensor:
    """From half-split rotary rows (transformers) to pairs of neighbours (GGUF `llama`), per head."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}


def file_tensors(
    family: Family, config: Mapping[str, Any], state: Mapping[str, torch.Tensor]
) -> Iterator[Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, value in state.items():
        stem, _, suffix = name.rpartition(".")
        if stem in _TOP:
            yield Tensor(f"{_TOP[stem]}.{suffix}", value, changed=_change(family, name))
            continue
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        if renamed := family.renamed.get(f"{part}.{suffix}".lstrip(".")):
            yield Tensor(f"blk.{layer}.{renamed}", value)
            continue
        if part.rpartition(".")[2] == "experts":
            for end, tensor in family.experts(suffix, value):
                yield Tensor(f"blk.{layer}.{end}", tensor)
            continue
        if part.startswith("linear_attn"):
            tiled = family.architecture == "qwen35moe"
            part = name.rpartition("linear_attn.")[2]
            yield from _delta_net_tensors(f"blk.{layer}", part, config, value, tiled=tiled)
            continue
        if part == "self_attn.kv_b_proj":
            yield from _split_latent_products(f"blk.{layer}", config, value)
            continue
        if (whole := f"{part}.{suffix}") in family.names:
            yield Tensor(f"blk.{layer}.{family.names[whole]}", value)
            continue
        names = {"post_attention_layernorm": family.norm2} | family.names
        shorts = (names.get(part) or _BLOCK[part]).split()
        for short, piece in zip(shorts, value.chunk(len(shorts)), strict=True):
            rows = _interleaved(heads[short], len(piece)) if family.permuted and short in heads else None
            flat = piece[0] if short == "ffn_gate_inp_shexp" else piece
            yield Tensor(f"blk.{layer}.{short}.{suffix}", flat, rows, changed=_change(family, name))


def _change(family: Family, name: str) -> str:
    return "+1" if name.endswith("norm.weight") and family.zero_centred(name) else ""


def _delta_net_tensors(
    block: str, part: str, config: Mapping[str, Any], value: torch.Tensor, *, tiled: bool
) -> Iterator[Tensor]:
    """Qwen3-Next fuses its projections by key head; Qwen3.5 does not, but its file deals value heads out in turn."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = config["linear_value_head_dim"]
    value_rows = values * width
    if part == "in_proj_qkvz.weight":
        sizes = [config["linear_key_head_dim"]] * 2 + [value_rows // keys] * 2
        *qkv, z = (p.flatten() for p in torch.arange(len(value)).view(keys, -1).split(sizes, dim=1))
        yield Tensor(f"{block}.attn_qkv.weight", value, torch.cat(qkv))
        yield Tensor(f"{block}.attn_gate.weight", value, z)
        return
    if part == "in_proj_ba.weight":
        yield Tensor(f"{block}.ssm_ba.weight", value)
        return
    names = {
        "in_proj_qkv.weight": "attn_qkv.weight",
        "in_proj_z.weight": "attn_gate.weight",
        "in_proj_a.weight": "ssm_alpha.weight",
        "in_proj_b.weight": "ssm_beta.weight",
        "A_log": "ssm_a",
        "dt_bias": "ssm_dt.bias",
        "conv1d.weight": "ssm_conv1d.weight",
        "norm.weight": "ssm_norm.weight",
        "out_proj.weight": "ssm_out.weight",
    }
    name, changed = f"{block}.{names[part]}", "-exp" if part == "A_log" else ""
    value = value[:, 0] if part == "conv1d.weight" else value
    if not tiled or part == "norm.weight":
        yield Tensor(name, value, changed=changed)
        return
    heads = torch.arange(values).view(keys, -1).t().flatten()
    rows = (heads[:, None] * width + torch.arange(width)).flatten()
    if part == "out_proj.weight":
        yield Tensor(name, value, columns=rows)
    elif len(value) == values:
        yield Tensor(name, value, heads, changed=changed)
    else:
        untouched = torch.arange(len(value) - value_rows)
        yield Tensor(name, value, torch.cat((untouched, len(untouched) + rows)))


def _split_latent_products(block: str, config: Mapping[str, Any], value: torch.Tensor) -> Iterator[Tensor]:
    """What makes keys and values of a latent, head by head: the part for keys transposed."""
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    both = value.view(heads, -1, value.shape[1])
    yield Tensor(f"{block}.attn_k_b.weight", both[:, :plain].transpose(1, 2))
    yield Tensor(f"{block}.attn_v_b.weight", both[:, plain:])

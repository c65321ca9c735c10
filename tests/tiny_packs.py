"""What tests of tiny models and their packs share."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from leanmoe import LLM
from leanmoe.models.batch import Batch
from leanmoe.pack import open_pack

MOE = [
    "qwen3moe",
    "qwen2moe",
    "olmoe",
    "mixtral",
    "qwen3next",
    "qwen35moe",
    "gpt-oss",
    "granitemoe",
    "glm4moe",
    "minimax-m2",
    "deepseek2",
    "gemma4",
]
TOKENS = Random(7).choices(range(280), k=96)
PackTiny = Callable[..., tuple[Any, Path]]


def floor_bytes(path: Path, devices: int = 1) -> int:
    """Bytes of the fewest slots that work: one layer's top-k twice, on each device."""
    manifest = open_pack(path).manifest
    return devices * max(m.layout.file_bytes for m in manifest.layers) * 2 * manifest.expert_used_count


def decode(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """Logits [N, vocab] of `tokens`, fed one by one."""
    dtype = torch.float16
    state = llm.decoder.new_state(len(tokens), dtype)
    return torch.cat([llm.decoder.forward(Batch.of([(state, [t])])) for t in tokens])

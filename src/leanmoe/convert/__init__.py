"""Checkpoints in safetensors format to packs, through the GGUF that they would be. One file per architecture."""

from leanmoe.convert.conversion import supported_models
from leanmoe.convert.mixture import QUANTS
from leanmoe.convert.model import SETTINGS, CheckpointSource

__all__ = ["QUANTS", "SETTINGS", "CheckpointSource", "supported_models"]

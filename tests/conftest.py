"""Fixtures for every test file. Nothing heavy is imported here: collecting the tests stays quick."""

from model_fixtures import demo_gguf, demo_pack, smollm2_gguf, tiny_model

__all__ = ["demo_gguf", "demo_pack", "smollm2_gguf", "tiny_model"]

"""Fixtures for every test file. Nothing heavy is imported here: collecting the tests stays quick."""

import faulthandler
from collections.abc import Iterator

import pytest

from model_fixtures import demo_gguf, demo_pack, packed, smollm2_gguf, tiny_model

__all__ = ["demo_gguf", "demo_pack", "packed", "smollm2_gguf", "tiny_model"]


@pytest.fixture
def deadlock_guard() -> Iterator[None]:
    """A deadlock ends the run and shows every thread's stack, instead of hanging for ever."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()

"""The side-by-side measurement with llama.cpp, as far as it goes without minutes of running."""

import importlib.util
from pathlib import Path

import pytest

from leanmoe.bench import compare
from leanmoe.errors import LeanError, UsageError


def test_without_llama_cpp_it_ends_before_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran lean for minutes, and then failed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(compare, "_run", lambda *_: pytest.fail("something was run"))
    with pytest.raises(LeanError, match="pip install xllamacpp"):
        compare.measure(Path("a"), Path("b"), ["none"], 1, 1, 1, Path("c"))


def test_limits_are_shown_as_they_were_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """1080MiB was shown as 1.1 GiB."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    asked: list[int | None] = []
    monkeypatch.setattr(compare, "_run", lambda command, limit, prompt: asked.append(limit) or "killed")
    results = compare.measure(tmp_path, tmp_path, ["1080MiB", "none"], 1, 1, 1, tmp_path)
    assert asked == [1080 << 20] * 2 + [None] * 2
    table = compare.markdown(results)
    assert "| 1080 MiB | lean | killed" in table
    assert "| no limit | llama.cpp | killed" in table
    with pytest.raises(UsageError, match="lots"):
        compare.measure(tmp_path, tmp_path, ["lots"], 1, 1, 1, tmp_path)

"""The rooms of the package import downwards only, so that each can be understood without those above it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import leanmoe

ROOT = Path(leanmoe.__file__).parent
ROOMS = [
    *(
        "bench",
        "cli",
        "server",
        "engine",
        "hub",
        "convert",
        "text",
        "models",
        "experts",
        "kernels",
        "pack",
        "formats",
    ),
]
SHARED = {"errors", "units"}
FILES = sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (n.split(".")[1] for n in names if n.startswith("leanmoe.") and n.count("."))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_the_rooms_below_it(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    allowed = {*SHARED, room, *ROOMS[ROOMS.index(room) + 1 :]}
    assert set(_imports(path)) <= allowed


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_below_the_command_line_reads_the_environment(path: Path) -> None:
    if path.relative_to(ROOT).parts[0] not in ("bench", "cli"):
        text = path.read_text()
        assert "os.environ" not in text
        assert "getenv" not in text

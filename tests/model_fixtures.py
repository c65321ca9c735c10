"""Models that several test files need, each made once per session or kept in the user's cache."""

import fcntl
import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from oracles.tiny import TinyModel
    from tiny_packs import PackTiny

DEMO = Path(__file__).resolve().parent.parent / "demo"
DEMO_EXPERTS = 8

_OWN_PARAGRAPH = """
The harbour was quiet before six. Two men were mending a net on the stones, and neither of them spoke until the
ferry had turned the corner of the breakwater; then the older one said that the wind would go round to the north
by noon, and that whoever meant to cross had better do it early. "You said so yesterday," the other answered,
"and yesterday it rained." They both laughed. In 1987 the same ferry had carried 412 passengers in one day, which
was thought impossible; today it carried nine, a dog, and eleven boxes of plums.
"""


def real_text(characters: int = 3600) -> str:
    """English prose and technical text, `characters` long: at 3600 more than 700 tokens of SmolLM2's."""
    from pydoc_data import topics

    reference = "\n\n".join(topics.topics[name] for name in ("truth", "naming", "exceptions", "with"))
    return (_OWN_PARAGRAPH.strip() + "\n\n" + reference)[:characters]


def _on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@contextmanager
def alone_in(cache: Path) -> Iterator[None]:
    """Of the processes that test at once, one downloads and builds; the others wait, and find it done."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, dense, Q4_1: downloaded into the cache once. Skips where it cannot be fetched."""
    _on_path(DEMO)
    from smollm2 import DemoError, default_cache, fetch

    try:
        with alone_in(default_cache()):
            return fetch(default_cache())
    except DemoError as error:
        pytest.skip(f"SmolLM2 is not in the cache and cannot be downloaded: {error}")


def _builder_digest() -> str:
    sources = sorted([*DEMO.glob("*.py"), DEMO / "calibration.txt"])
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in sources if path.name != "run.py")
    ).hexdigest()[:12]


@pytest.fixture(scope="session")
def demo_gguf(smollm2_gguf: Path) -> Path:
    """The demo model with 8 experts per layer (0.7 GB), built into the cache, anew when its builder changed.

    A test that asks for it is slow: mark it so.
    """
    from build_model import build

    cache = smollm2_gguf.parent
    out = cache / f"demo-{DEMO_EXPERTS}-{_builder_digest()}.gguf"
    with alone_in(cache):
        for stale in cache.glob(f"demo-{DEMO_EXPERTS}-*.gguf"):
            if stale != out:
                stale.unlink()
        build(out, DEMO_EXPERTS, cache)
    return out


@pytest.fixture(scope="session")
def demo_pack(smollm2_gguf: Path) -> Path:
    """The demo model as `make demo` packs it, 2.7 GB, in the cache, anew when its builder changed: mark slow."""
    from build_model import build
    from leanmoe.pack import pack_gguf

    cache = smollm2_gguf.parent
    out = cache / f"demo-32-{_builder_digest()}.lmpack"
    with alone_in(cache):
        for stale in cache.glob("demo-32-*.lmpack"):
            if stale != out:
                shutil.rmtree(stale)
        if not out.exists():
            gguf = cache / "demo-32.gguf"
            build(gguf, 32, cache)
            pack_gguf(gguf, out, consume=True)
    return out


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., "TinyModel"]]:
    """`tiny_model(arch, quant="F32", seed=0, **overrides)`: as `oracles.tiny.tiny_gguf`, each made once."""
    from oracles.tiny import tiny_gguf

    folder = tmp_path_factory.mktemp("tiny")
    made: dict[str, TinyModel] = {}

    def make(arch: str, quant: str = "F32", seed: int = 0, **overrides: Any) -> "TinyModel":
        key = f"{arch} {quant} {seed} {sorted(overrides.items())}"
        if key not in made:
            path = folder / f"{arch}-{quant}-{len(made)}.gguf"
            made[key] = tiny_gguf(path, arch, quant, seed, **overrides)
        return made[key]

    yield make
    for tiny in made.values():
        tiny.path.unlink()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Any]) -> "PackTiny":
    """Makes a tiny model and its pack once for each set of arguments."""
    from leanmoe.pack import pack_gguf

    made: dict[Path, Path] = {}

    def make(arch: str, quant: str = "F32", **overrides: object) -> tuple[Any, Path]:
        tiny = tiny_model(arch, quant, **overrides)
        if tiny.path not in made:
            made[tiny.path] = pack_gguf(tiny.path, tmp_path_factory.mktemp("packs") / "tiny.lmpack")
        return tiny, made[tiny.path]

    return make

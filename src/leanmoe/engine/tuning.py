"""What `lean tune` found out about a pack on a machine, kept in the pack: choices, and the figures behind them.

The file `tuning` is JSON: {"version": 1, "entries": [...]}, an entry for each machine and budget, the newest last.
Without it, or where it cannot be used, the defaults hold.
"""

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leanmoe.engine.config import Choice, EngineConfig
from leanmoe.errors import LeanError
from leanmoe.experts.files import replace_file

TUNING = "tuning"
"""The name of the file inside a pack's directory."""
PROFILE = "profile"
"""The name of a pack's routing profile inside its directory."""
TRACE = "trace"
"""The name of a pack's own routing trace inside its directory."""

_VERSION = 1
_MAX_ENTRIES = 16
_MAX_BYTES = 1 << 20
# A choice holds for budgets this much larger or smaller than the one it was made for.
_NEAR = 1.25
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """`compute_seconds` of a token of which nothing is read; bytes per second read by so many threads at once."""

    compute_seconds: float
    read_rates: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Tuned:
    """One tuning: for the machine `host` and a budget of `memory` bytes."""

    host: str
    memory: int
    choice: Choice
    measured: Measured


def this_host() -> str:
    """The processor and how many cores of it may be used: what figures of one machine hold for."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def keep(pack: Path, tuned: Tuned) -> None:
    """Adds an entry to the pack's file, in place of one for the same machine and budget. Raises `OSError`."""
    others = [t for t in _load(pack / TUNING) if (t.host, t.memory) != (tuned.host, tuned.memory)]
    entries = [asdict(t) for t in (*others[1 - _MAX_ENTRIES :], tuned)]
    replace_file(pack / TUNING, json.dumps({"version": _VERSION, "entries": entries}, indent=1).encode())


def find_tuned(pack: Path) -> list[Tuned]:
    """The tunings of this pack on this machine, for whatever budget; the newest last."""
    host = this_host()
    return [t for t in _load(pack / TUNING) if t.host == host]


def choice_for(tuned: Iterable[Tuned], memory: int) -> Choice | None:
    """What was chosen with about as much memory (within a quarter)."""
    near = [(abs(math.log(memory / t.memory)), t) for t in tuned]
    distance, nearest = min(near, key=lambda pair: pair[0], default=(math.inf, None))
    return nearest.choice if nearest is not None and distance <= math.log(_NEAR) else None


def _load(path: Path) -> list[Tuned]:
    """The entries; none if there is no file or, with a warning, if it cannot be used."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        found: Any = json.loads(path.read_bytes())
        if found["version"] != _VERSION:
            raise ValueError(f"its version is {found['version']!r}; this lean reads version {_VERSION}")
        return [_entry(entry) for entry in found["entries"][:_MAX_ENTRIES]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, LeanError) as why:
        _log.warning("%s is not used: %s; `lean tune` makes a new one", path, why)
        return []


def _entry(entry: Mapping[str, Any]) -> Tuned:
    """Raises what reading an entry that nobody vouches for may raise: `UsageError` for an impossible choice."""
    choice = Choice(**entry["choice"])
    EngineConfig(**asdict(choice))
    rates = {int(n): float(rate) for n, rate in entry["measured"]["read_rates"].items()}
    measured = Measured(float(entry["measured"]["compute_seconds"]), rates)
    memory = int(entry["memory"])
    figures = (measured.compute_seconds, *rates.values(), memory)
    if not all(math.isfinite(x) and x > 0 for x in figures) or min(rates) < 1:
        raise ValueError("it has figures that are not positive numbers")
    return Tuned(str(entry["host"]), memory, choice, measured)

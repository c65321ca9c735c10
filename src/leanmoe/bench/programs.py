"""The programs that are compared: how each is called, and what it says it did."""

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from leanmoe.bench.cgroup import Finished
from leanmoe.errors import LeanError, UsageError

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """What every program is to do: a prompt of `prompt_tokens`, then `tokens` one by one.

    `prompt` is a file with the text; None feeds random tokens instead. `warm` has everything in memory before the
    clock starts, as far as it fits.
    """

    prompt: Path | None
    prompt_tokens: int
    tokens: int
    context: int
    threads: int
    warm: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """How llama.cpp holds the weights: mapped or read, as they are or rearranged for its kernels ("repacked")."""

    load: str
    repack: bool

    @classmethod
    def parse(cls, text: str) -> "Setting":
        load, _, repack = text.strip().partition("+")
        if load not in ("mmap", "none") or repack not in ("", "repack"):
            raise UsageError(f"setting '{text}' is unknown; wanted mmap, none, mmap+repack or none+repack")
        return cls(load, bool(repack))

    def __str__(self) -> str:
        return self.load + ("+repack" if self.repack else "")


class Program(Protocol):
    """One engine. `files` are dropped from the page cache before each run."""

    name: str
    files: Path

    def command(self, task: Task, limit: int | None, setting: Setting | None) -> list[str]:
        """What to run for `task`."""

    def stdin(self, task: Task) -> Path | None:
        """The file that standard input comes from, if any."""

    def read(self, done: Finished) -> Record:
        """The record of a run: rates, counts and times. Raises `LeanError` if it has none."""


class Lean:
    """lean, as `lean run` (text) or `lean bench --random` does it."""

    def __init__(self, pack: Path) -> None:
        self.name, self.files = "lean", pack

    def command(self, task: Task, limit: int | None, setting: Setting | None = None) -> list[str]:
        """See `Program`. The budget is the limit."""
        words = [sys.executable, "-m", "leanmoe.bench.own", str(self.files), "--tokens", str(task.tokens)]
        words += ["--context", str(task.context), "--threads", str(task.threads)]
        words += [] if limit is None else ["--memory", str(limit)]
        words += ["--random", str(task.prompt_tokens)] if task.prompt is None else []
        return words + (["--warm"] if task.warm else [])

    def stdin(self, task: Task) -> Path | None:
        """The prompt."""
        return task.prompt

    def read(self, done: Finished) -> Record:
        """See `Program`."""
        return _json_record(done)


class Wheel:
    """llama.cpp in the wheel `xllamacpp`: built for AVX2, whatever the processor has."""

    def __init__(self, gguf: Path) -> None:
        self.name, self.files = "llama.cpp", gguf

    def command(self, task: Task, limit: int | None, setting: Setting | None) -> list[str]:
        """See `Program`. Raises `UsageError` for random tokens, which it cannot be given."""
        if task.prompt is None:
            raise UsageError("random tokens need llama-bench; xllamacpp takes text")
        words = [sys.executable, "-m", "leanmoe.bench.rival", str(self.files)]
        words += [
            "--tokens",
            str(task.tokens + 1),
            "--context",
            str(task.context),
            "--threads",
            str(task.threads),
        ]
        if setting is not None:
            words += ["--load", setting.load, *([] if setting.repack else ["--no-repack"])]
        return words + (["--warm"] if task.warm else [])

    def stdin(self, task: Task) -> Path | None:
        """The prompt."""
        return task.prompt

    def read(self, done: Finished) -> Record:
        """See `Program`."""
        return _json_record(done)


_TIMES = re.compile(r"^.*?(prompt )?eval time =\s*([\d.]+) ms /\s*(\d+) (?:tokens|runs)", re.MULTILINE)

_STOPPED = "\nInterrupted by user"  # stands behind the text of an interrupted run


class Completion:
    """`llama-completion`: a greedy continuation of the prompt by a llama.cpp that was built for this machine."""

    def __init__(self, program: Path, gguf: Path, extra: Sequence[str] = ()) -> None:
        self.name, self.files, self.program, self.extra = "llama.cpp", gguf, program, list(extra)
        self._modes = _load_flags(program)

    def command(self, task: Task, limit: int | None, setting: Setting | None) -> list[str]:
        """See `Program`."""
        assert task.prompt is not None
        words = [str(self.program), "-m", str(self.files), "-f", str(task.prompt), "-n", str(task.tokens + 1)]
        words += ["-c", str(task.context), "-t", str(task.threads), "--temp", "0", "--ignore-eos", "-no-cnv"]
        words += ["--no-display-prompt", *([] if task.warm else ["--no-warmup"]), *self.extra]
        if setting is not None:
            words += [*self._modes[setting.load], "--repack" if setting.repack else "--no-repack"]
        return words

    def stdin(self, task: Task) -> Path | None:
        """None: the prompt is a file, and text on standard input would cost the timings at the end."""
        return None

    def read(self, done: Finished) -> Record:
        """See `Program`. Of an interrupted run, what was finished."""
        found = {
            "prompt" if prompt else "decode": (float(ms) / 1000, int(n))
            for prompt, ms, n in _TIMES.findall(done.stderr + done.stdout)
        }
        if "prompt" not in found:
            raise LeanError(_last_words(done))
        (prompt_seconds, prompted), (seconds, fed) = found["prompt"], found.get("decode", (0.0, 0))
        return {
            "text": done.stdout.split("common_perf_print", 1)[0].strip("\n").removesuffix(_STOPPED),
            "finished": done.in_time,
            "prompt_tokens": prompted,
            "decode_tokens": fed,
            "prompt_tokens_per_second": prompted / prompt_seconds if prompted and prompt_seconds else None,
            "decode_tokens_per_second": fed / seconds if fed and seconds else None,
        }


class LlamaBench:
    """`llama-bench`: random tokens."""

    def __init__(self, program: Path, gguf: Path, extra: Sequence[str] = ()) -> None:
        self.name, self.files, self.program, self.extra = "llama.cpp", gguf, program, list(extra)
        self._modes = _load_flags(program)

    def command(self, task: Task, limit: int | None, setting: Setting | None) -> list[str]:
        """See `Program`."""
        words = [
            str(self.program),
            "-m",
            str(self.files),
            "-p",
            str(task.prompt_tokens),
            "-n",
            str(task.tokens),
        ]
        words += ["-t", str(task.threads), "-o", "jsonl", "-r", "3" if task.warm else "1"]
        words += [] if task.warm else ["--no-warmup"]
        if setting is not None:
            words += [*self._modes[setting.load], "--repack", str(int(setting.repack))]
        return words + self.extra

    def stdin(self, task: Task) -> Path | None:
        """None: it makes its own tokens."""
        return None

    def read(self, done: Finished) -> Record:
        """See `Program`. Of an interrupted run, the tests that were finished."""
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise LeanError(_last_words(done))
        record: Record = {"finished": done.in_time, "build": lines[0].get("build_commit")}
        for line in lines:
            kind = "decode" if line["n_gen"] else "prompt"
            record |= {f"{kind}_tokens": line["n_gen"] or line["n_prompt"]}
            record |= {f"{kind}_tokens_per_second": line["avg_ts"]}
        return record


def find_rival(
    gguf: Path, bench: Path | None, *, text: bool, extra: Sequence[str] = ()
) -> tuple[Program, str]:
    """The fastest llama.cpp there is, and what it is.

    `bench` is a llama-bench, else the one on the path. For `text`, the `llama-completion` beside it is run. Raises
    `LeanError` if there is none.
    """
    on_path = shutil.which("llama-bench")
    found = bench or (Path(on_path) if on_path else None)
    if bench is not None and not bench.is_file():
        raise UsageError(f"{bench}: there is no llama-bench; see docs/performance.md for how to build it")
    if found is not None and not text:
        return LlamaBench(found, gguf, extra), f"{found}, {_version(found)}"
    if not text:
        raise LeanError(
            "random tokens need llama-bench on the path or with --llama-bench; docs/performance.md builds it"
        )
    if found is not None:
        beside = found.with_name("llama-completion")
        if beside.is_file():
            return Completion(beside, gguf, extra), f"{beside}, {_version(beside)}"
        raise UsageError(
            f"{beside} is missing: llama-bench cannot continue a text; build it too, or use --random"
        )
    if importlib.util.find_spec("xllamacpp") is None:
        raise LeanError(
            "there is no llama.cpp to compare with: build llama-bench and llama-completion (docs/performance.md), or "
            "pip install xllamacpp"
        )
    version = importlib.metadata.version("xllamacpp")
    return Wheel(
        gguf
    ), f"xllamacpp {version}, a wheel built for AVX2 only: a llama.cpp built for this machine is faster"


def _load_flags(program: Path) -> dict[str, list[str]]:
    """How this build is told to map the file or to read it."""
    shown = subprocess.run([str(program), "--help"], capture_output=True, text=True, check=False)
    if "--load-mode" in shown.stdout + shown.stderr:
        return {"mmap": ["--load-mode", "mmap"], "none": ["--load-mode", "none"]}
    if "--n-prompt" in shown.stdout + shown.stderr:
        return {"mmap": ["-mmp", "1"], "none": ["-mmp", "0"]}
    return {"mmap": [], "none": ["--no-mmap"]}


def _version(program: Path) -> str:
    shown = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False)
    lines = [line.strip() for line in (shown.stderr + shown.stdout).splitlines() if "version" in line]
    return lines[0] if lines else "version unknown"


def _json_record(done: Finished) -> Record:
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise LeanError(_last_words(done))
    record: Record = json.loads(lines[-1])
    return record


def _last_words(done: Finished) -> str:
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"

"""The side-by-side measurement with llama.cpp: who runs when, what is kept of it, and how it is written."""

import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cgroup import limits, memory_limit
from leanmoe.bench import compare, disk, own
from leanmoe.bench.cgroup import DiskLimit, Finished, Group, nearest_with
from leanmoe.bench.compare import prompt_text
from leanmoe.bench.figures import draw_all
from leanmoe.bench.machine import describe
from leanmoe.bench.programs import Completion, Lean, LlamaBench, Setting, Task, Wheel, find_rival
from leanmoe.bench.report import commands, markdown, ratios
from leanmoe.bench.turns import Plan, measure, median
from leanmoe.errors import LeanError, UnsupportedError, UsageError
from leanmoe.pack import pack_gguf

TASK = Task(Path("prompt"), 8, 4, 64, 2, False)
MMAP, REPACKED, READ = (Setting.parse(text) for text in compare.SETTINGS.split(","))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from oracles.tiny import tiny_gguf

    return tiny_gguf(tmp_path_factory.mktemp("bench") / "tiny.gguf", "qwen3moe", "Q4_K").path


@pytest.fixture(scope="module")
def pack(gguf: Path) -> Path:
    return pack_gguf(gguf, gguf.with_suffix(".lmpack"))


def finished(stdout: str = "", stderr: str = "", *, in_time: bool = True) -> Finished:
    return Finished(0 if in_time else 130, stdout, stderr, 1.0, 1 << 20, in_time)


def answered(prompt: float, decode: float, **more: Any) -> dict[str, Any]:
    rates = {"prompt_tokens_per_second": prompt, "decode_tokens_per_second": decode}
    return {**rates, "prompt_tokens": 8, "decode_tokens": 4, "memory_peak": 1 << 30, "finished": True, **more}


def counted() -> dict[str, Any]:
    """What lean's records have beside rates."""
    each = {"kernel_seconds": 0.01, "stall_seconds": 0.02, "rest_seconds": 0.001, "hit_rate": 0.5}
    each |= {"read_bytes": 1 << 20, "read_rate": 1e9}
    return {"residency": 0.25, **{f"{p}_{k}": v for p in ("prompt", "decode") for k, v in each.items()}}


def test_without_llama_cpp_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LeanError, match="pip install xllamacpp"):
        find_rival(Path("m.gguf"), None, text=True)
    with pytest.raises(LeanError, match="need llama-bench"):
        find_rival(Path("m.gguf"), None, text=False)
    with pytest.raises(UsageError, match="there is no llama-bench"):
        find_rival(Path("m.gguf"), Path("nowhere/llama-bench"), text=False)


def test_without_a_built_llama_cpp_the_wheel_is_run_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    rival, about = find_rival(Path("m.gguf"), None, text=True)
    assert isinstance(rival, Wheel)
    assert "AVX2 only" in about


def test_limits_are_shown_as_they_were_given() -> None:
    """1080MiB was shown as 1.1 GiB."""
    assert compare._limits("1080MiB, none") == {"1080 MiB": 1080 << 20, "no limit": None}
    with pytest.raises(UsageError, match="lots"):
        compare._limits("lots")
    with pytest.raises(UsageError, match="setting 'fast' is unknown"):
        Setting.parse("fast")


def test_every_setting_is_tried_and_only_the_best_take_turns() -> None:
    """A rival in its worst setting, or hours of runs that nobody looks at."""
    rates = {MMAP: (10.0, 3.0), REPACKED: (20.0, 2.0), READ: "killed: out of memory"}
    order: list[tuple[str, str, bool]] = []

    def run(program: Any, task: Task, limit: int | None, setting: Setting | None) -> Any:
        order.append((program.name, str(setting or ""), task.warm))
        if setting is None:
            return answered(100.0 + len(order), 30.0)
        rate = rates[setting]
        return rate if isinstance(rate, str) else answered(*rate)

    plan = Plan(TASK, {"1 GiB": 1 << 30}, (MMAP, REPACKED, READ), 3)
    results = measure(plan, Lean(Path("p")), Wheel(Path("g")), run, lambda line: None)
    names = [(engine, setting) for engine, setting, _ in order]
    turn = [("lean", ""), ("llama.cpp", "mmap"), ("llama.cpp", "mmap+repack")]
    assert names == [*turn, ("llama.cpp", "none"), *turn, *turn]
    assert not any(warm for *_, warm in order)
    assert results[0]["prompt_tokens_per_second"] == 105.0
    assert results[0]["runs"] == 3
    assert results[3]["failed"] == "killed: out of memory"
    assert "| 1 GiB | 5.25 x (mmap+repack) | 10.00 x (mmap) |" in ratios(results)
    assert "| 1 GiB | llama.cpp, none | killed: out of memory |" in markdown(results)


def test_without_a_limit_both_are_warm_and_a_rival_without_answers_is_not_asked_again() -> None:
    taken: list[tuple[str, bool]] = []

    def run(program: Any, task: Task, limit: int | None, setting: Setting | None) -> Any:
        taken.append((program.name, task.warm))
        return answered(1.0, 1.0) if setting is None else "exit code 1"

    plan = Plan(TASK, {"no limit": None}, (MMAP,), 2)
    results = measure(plan, Lean(Path("p")), Wheel(Path("g")), run, lambda line: None)
    assert taken == [("lean", True), ("llama.cpp", True), ("lean", True)]
    assert "exit code 1" in ratios(results)


def test_the_report_names_the_commands_that_were_run() -> None:
    """With another one, what was measured cannot be measured again."""
    programs = Lean(Path("p")), Wheel(Path("g"))
    for limit, warm in ((None, True), (1 << 30, False)):
        said = commands(Plan(TASK, {"here": limit}, (MMAP,), 1), programs)
        assert ["--warm" in line for line in said] == [warm, warm]


def test_a_run_cut_short_counts_with_what_it_finished_and_is_marked() -> None:
    cut = median([{**answered(0.0, 0.09), "prompt_tokens_per_second": None, "finished": False}])
    results = [{"engine": "llama.cpp", "setting": "mmap", "limit": 1, "limit_name": "3 GiB", **cut}]
    table = markdown(results)
    assert "| not finished | 0.09 (of 4 tokens, then cut short) |" in table


def test_failures_beside_answers_are_kept() -> None:
    found = median([answered(1, 2), "exit code 1", answered(3, 4)])
    assert found["decode_tokens_per_second"] == 3
    assert (found["runs"], found["failures"]) == (2, ["exit code 1"])


def own_record(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["own", *words, "--context", "64", "--memory", str(12 << 30)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello there"))
    before = signal.getsignal(signal.SIGINT)
    try:
        own.main()
    finally:
        signal.signal(signal.SIGINT, before)
    return json.loads(capsys.readouterr().out)


def test_what_lean_measures_of_itself_adds_up(
    pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cold = own_record(monkeypatch, capsys, str(pack), "--tokens", "6")
    assert (cold["decode_tokens"], cold["finished"]) == (6, True)
    assert cold["prompt_read_bytes"] > 0
    parts = [cold[f"decode_{part}_seconds"] for part in ("kernel", "stall", "rest")]
    assert sum(parts) == pytest.approx(1 / cold["decode_tokens_per_second"])
    assert min(parts) >= 0
    warm = own_record(monkeypatch, capsys, str(pack), "--tokens", "6", "--warm")
    assert warm["text"] == cold["text"]
    assert (warm["prompt_read_bytes"], warm["decode_hit_rate"]) == (0, 1)


def test_random_tokens_are_measured_as_prompt_and_one_by_one(
    pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = own_record(monkeypatch, capsys, str(pack), "--tokens", "4", "--random", "8", "--warm")
    assert (both["prompt_tokens"], both["decode_tokens"]) == (8, 4)
    assert both["prompt_read_bytes"] == both["decode_read_bytes"] == 0
    alone = own_record(monkeypatch, capsys, str(pack), "--tokens", "0", "--random", "8")
    assert "decode_tokens" not in alone
    assert alone["prompt_read_bytes"] > 0


COMPLETION = """
common_perf_print:        load time =    1083.22 ms
common_perf_print: prompt eval time =    2000.00 ms /   100 tokens (   20.00 ms per token,    50.00 tokens per second)
common_perf_print:        eval time =    4000.00 ms /    40 runs   (  100.00 ms per token,    10.00 tokens per second)
common_perf_print:       total time =    7000.00 ms /   140 tokens
"""


def program(tmp_path: Path, shown: str) -> Path:
    """A program whose --help has `shown`."""
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\necho '{shown}'\n")
    path.chmod(0o755)
    return path


def test_llama_completion_is_read_whether_it_ended_or_was_interrupted(tmp_path: Path) -> None:
    rival = Completion(program(tmp_path, "--load-mode MODE"), Path("m.gguf"), ["-ub", "2048"])
    record = rival.read(finished(stdout=" and so on", stderr=COMPLETION))
    assert record["text"] == " and so on"
    assert (record["prompt_tokens_per_second"], record["decode_tokens_per_second"]) == (50, 10)
    cut = rival.read(
        finished(
            stdout=" and so\nInterrupted by user\n",
            stderr=COMPLETION.replace("4000.00 ms /    40", "0.00 ms /     0"),
            in_time=False,
        )
    )
    assert cut["text"] == " and so"
    assert cut["decode_tokens_per_second"] is None
    assert not cut["finished"]
    with pytest.raises(LeanError, match="cannot load"):
        rival.read(finished(stderr="error: cannot load"))
    assert rival.stdin(TASK) is None  # with text there, it prints no times
    assert Lean(Path("p")).stdin(TASK) == TASK.prompt
    words = rival.command(TASK, None, REPACKED)
    assert words[words.index("-n") + 1] == "5"
    assert words[-5:] == ["-ub", "2048", "--load-mode", "mmap", "--repack"]


def test_llama_bench_is_read_line_by_line(tmp_path: Path) -> None:
    rival = LlamaBench(program(tmp_path, "-p, --n-prompt; -mmp"), Path("m.gguf"))
    lines = [{"n_prompt": 512, "n_gen": 0, "avg_ts": 90.0}, {"n_prompt": 0, "n_gen": 64, "avg_ts": 14.0}]
    both = rival.read(finished("\n".join(map(json.dumps, lines))))
    assert (both["prompt_tokens_per_second"], both["decode_tokens_per_second"]) == (90, 14)
    cut = rival.read(finished(json.dumps(lines[0]), in_time=False))
    assert "decode_tokens_per_second" not in cut
    words = rival.command(Task(None, 512, 64, 600, 2, True), None, READ)
    assert words[words.index("-r") + 1] == "3"
    assert words[-4:] == ["-mmp", "0", "--repack", "0"]


def test_a_command_that_takes_too_long_is_interrupted_and_its_memory_known() -> None:
    done = Group(()).run(["sleep", "600"], seconds=0)
    assert (done.returncode, done.in_time) == (-signal.SIGINT, False)
    block = Group(()).run([sys.executable, "-c", "b = b'x' * (200 << 20); print('made')"])
    assert block.stdout == "made\n"
    assert block.in_time
    assert block.peak > 200 << 20


def test_a_command_is_interrupted_though_this_process_ignores_that() -> None:
    """As in a shell's background job, whose children inherit it."""
    script = (
        "import signal; from leanmoe.bench.cgroup import Group; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "print(Group(()).run(['sleep', '600'], seconds=0).returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout == f"{-signal.SIGINT}\n"


def test_a_killed_command_is_known_from_its_group() -> None:
    with memory_limit(64 << 20) as group:
        done = group.run(
            [sys.executable, "-c", "b = bytearray(200 << 20); b[::4096] = b'x' * len(b[::4096])"]
        )
        assert done.returncode != 0
        assert group.killed() > 0


@pytest.mark.cgroup
def test_a_disk_is_limited_by_the_kernel(tmp_path: Path) -> None:
    """What a comparison says of a slow disk would be of a fast one."""
    try:
        limit = DiskLimit.of(tmp_path, 50 << 20)
    except UnsupportedError as reason:
        pytest.skip(str(reason))
    with limits(256 << 20, limit) as group:
        held = [path / name for path in group.paths for name in ("io.max", "blkio.throttle.read_bps_device")]
        said = "".join(file.read_text() for file in held if file.exists())
        assert said.startswith(limit.device)
        assert str(50 << 20) in said
        inside = group.run(["cat", "/proc/self/cgroup"]).stdout
        assert inside.count(group.paths[0].name) == len(group.paths)
    assert not any(path.exists() for path in group.paths)


def test_a_disk_that_is_none_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no disk"):
        DiskLimit.of(Path("/proc"), 1)


def test_version_2_groups_are_made_where_memory_may_be_limited(tmp_path: Path) -> None:
    """A shell's own group cannot hold limited ones; the nearest above it that may does."""
    own = tmp_path / "user" / "session"
    own.mkdir(parents=True)
    for folder, enabled in ((tmp_path, "cpu memory"), (own.parent, "cpu memory pids"), (own, "cpu")):
        (folder / "cgroup.subtree_control").write_text(enabled + "\n")
    assert nearest_with(tmp_path, "user/session", ["memory"]) == own.parent
    with pytest.raises(UnsupportedError, match="limit memory and io"):
        nearest_with(tmp_path, "user/session", ["memory", "io"])
    for folder in (tmp_path, own.parent):
        (folder / "cgroup.subtree_control").write_text("cpu\n")
    with pytest.raises(UnsupportedError, match="Delegate=yes"):
        nearest_with(tmp_path, "user/session", ["memory"])


def test_the_prompt_has_as_many_tokens_as_were_asked_for(demo_pack: Path) -> None:
    from leanmoe.pack import open_pack
    from leanmoe.text import Tokenizer

    tokenizer = Tokenizer.from_metadata(open_pack(demo_pack).trunk.metadata)
    text = prompt_text(demo_pack, 300)
    assert 280 <= len(tokenizer.encode(text)) <= 300
    assert text == prompt_text(demo_pack, 300)


def test_the_disk_is_measured_with_the_packs_own_files(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_FIO_SECONDS", 1)
    found = disk.measure_disk(pack)
    assert found.rate > 0
    assert (found.block % 4096, found.depth) == (0, 4)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "not installed" in disk.measure_disk(pack).how


def test_fio_is_told_to_read_whole_files_and_its_rate_is_read() -> None:
    words = disk.fio_command("fio", Path("/p/experts"), [Path("000/001"), Path("001/000")], 8192, 4)
    assert {"--directory=/p/experts", "--filename=000/001:001/000", "--bs=8192", "--direct=1"} < set(words)
    assert disk.fio_rate('fio: note\n{"jobs": [{"read": {"bw_bytes": 5}}]}') == 5
    with pytest.raises(LeanError, match="no rate"):
        disk.fio_rate("{}")


def test_the_machine_is_described(tmp_path: Path) -> None:
    about = describe(tmp_path)
    assert str(os.cpu_count()) in about["processor"]
    assert " on " in about["disk"]
    assert "torch" in about["versions"]


def test_plots_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    """One engine's failure cost the plots of the other."""
    about = {"setting": "", "limit": 1 << 30, "limit_name": "1 GiB"}
    results = [
        {"engine": "lean", **about, **answered(50, 5), **counted()},
        {"engine": "llama.cpp", **about, "setting": "mmap", "failed": "killed", "runs": 1},
    ]
    names = {path.name for path in draw_all(tmp_path, results)}
    assert names == {"decode-speed.png", "prompt-speed.png", "hit-rate.png", "time.png"}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


@pytest.mark.slow
@pytest.mark.cgroup
def test_a_comparison_ends_with_a_report_that_both_engines_are_in(
    pack: Path, gguf: Path, tmp_path: Path
) -> None:
    """The whole of it, with the wheel: cold runs under a limit, the same text from both, plots and records."""
    with memory_limit(1 << 30):
        pass
    command = [sys.executable, "-m", "leanmoe.bench.compare", str(pack), str(gguf), "--limits", "1GiB"]
    command += [
        "--runs",
        "1",
        "--tokens",
        "8",
        "--settings",
        "mmap,none",
        "--report",
        str(tmp_path / "report"),
    ]
    hidden = {**os.environ, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=hidden)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| 1 GiB | lean |" in text
    assert "| 1 GiB | llama.cpp, none |" in text
    assert "texts are the same" in text
    assert "AVX2 only" in text
    assert "leanmoe.bench.own" in text
    assert "lean opened the model" in text
    records = json.loads((tmp_path / "report" / "records.json").read_text())["results"]
    assert [r["decode_tokens"] for r in records] == [8, 8, 8]
    assert records[0]["memory_peak"] <= 1 << 30
    assert records[0]["decode_kernel_seconds"] > 0
    plots = {path.name for path in (tmp_path / "report").glob("*.png")}
    assert plots == {"decode-speed.png", "prompt-speed.png", "hit-rate.png", "time.png"}
    assert not list(pack.parent.glob("*.prompt"))

"""The `lean` command as a user meets it: exit codes, messages, records, Ctrl-C."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lean_process import STARTED, lean, started
from leanmoe.pack import pack_gguf


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from oracles.tiny import tiny_gguf

    return tiny_gguf(tmp_path_factory.mktemp("cli") / "tiny.gguf", "qwen3moe", "Q4_K").path


@pytest.fixture(scope="module")
def path(gguf: Path) -> Path:
    return pack_gguf(gguf, gguf.with_suffix(".lmpack"))


def test_run_streams_text_to_stdout_and_the_account_to_stderr(path: Path) -> None:
    done = started("run", path, "-p", "Hello", "-n", "8", "--temp", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert "hit rate" in done.stderr
    assert "peak" in done.stderr


def test_run_json_is_one_record_equal_to_what_is_streamed(path: Path) -> None:
    arguments = ("run", path, "-n", "8", "--temp", "0", "--memory", "1GiB", "--context", "128")
    record = json.loads(started(*arguments, "-p", "Hello", "--json").stdout)
    assert record["text"] + "\n" == lean(*arguments, "-p", "-", stdin="Hello").stdout
    assert record["memory_peak"] <= record["memory_budget"] == 1 << 30
    assert record["completion_tokens"] == len(record["tokens"])


def test_run_says_what_prefetch_did(path: Path) -> None:
    """Who switches prefetch on must see whether it helps: useful, late, wasted, dropped; in JSON by layer."""
    arguments = ("run", path, "-p", "Hello", "-n", "8", "--ignore-eos", "--temp", "0", "--prefetch", "on")
    shown = lean(*arguments, "--stats").stderr
    assert all(word in shown for word in ("waited for reads", "useful", "late", "wasted", "dropped"))
    record = json.loads(lean(*arguments, "--json").stdout)
    names = {"issued", "useful", "late", "wasted", "dropped", "read_bytes"}
    assert set(record["prefetch"]) == names
    for layer in record["layers"].values():
        assert {"hits", "joined", "misses", "stall_seconds"} < set(layer)
        assert set(layer["prefetch"]) == names


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "PACK"], 2, "-p"),
        (["run", "PACK", "-p", "x", "--memory", "lots"], 2, "lots"),
        (["run", "PACK", "-p", "x", "--memory", "10MiB"], 1, "smallest that works"),
        (["run", "PACK", "-p", "x", "--temp", "-3"], 2, "temperature"),
        (["run", "PACK", "-p", "x", "--no-such-flag"], 2, "no-such-flag"),
        (["run", "PACK", "-p", "x", "--device", "cuda:9", "--vram", "1GiB"], 1, "cuda"),
        (["run", "PACK", "-p", "x", "--prefetch", "sometimes"], 2, "prefetch"),
        (["run", "PACK", "-p", "x", "--prefetch", "on", "--readers", "1"], 2, "readers"),
        (["run", "PACK", "-p", "x", "--policy", "clairvoyant"], 2, "clairvoyant"),
        (["run", "GGUF", "-p", "x"], 2, "lean pack"),
        (["run", "nowhere.lmpack", "-p", "x"], 2, "nowhere.lmpack"),
        (["plan", "GGUF", "--context", "99999999"], 2, "context"),
        (["plan", "nowhere.gguf"], 2, "nowhere.gguf"),
        (["verify", "nowhere.lmpack"], 2, "nowhere.lmpack"),
        (["info", "nowhere.gguf"], 2, "nowhere.gguf"),
    ],
)
def test_mistakes_end_in_one_message_and_the_right_code(
    arguments: Sequence[str], code: int, says: str, path: Path, gguf: Path
) -> None:
    names = {"PACK": str(path), "GGUF": str(gguf)}
    done = lean(*(names.get(a, a) for a in arguments))
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_plan_says_the_same_of_a_gguf_and_of_its_pack(path: Path, gguf: Path) -> None:
    plans = [json.loads(lean("plan", p, "--memory", "1GiB", "--json").stdout) for p in (gguf, path)]
    assert plans[0] == plans[1]
    assert plans[0]["residency"] == 1.0
    shown = lean("plan", path, "--memory", "1GiB").stdout
    for word in ("fixed", "estimated", "trunk", "KV state", "scratch", "expert slots", "smallest"):
        assert word in shown
    footer = shown.partition("smallest memory that works: ")[2].split()[0]
    assert lean("plan", path, "--memory", footer).returncode == 0


def test_plan_does_not_load_torch(gguf: Path) -> None:
    """Planning a 242 GB file must take well under a second, and importing torch alone takes longer."""
    code = "import sys; sys.argv[1:] = ['plan', sys.argv[1], '--json']\n"
    code += "from leanmoe.cli.main import app\napp(standalone_mode=False)\nassert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, str(gguf)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_smallest_memory_that_plan_names_is_enough_to_run(path: Path) -> None:
    """A user sizes a machine by this number."""
    floor = json.loads(lean("plan", path, "--memory", "4GiB", "--context", "256", "--json").stdout)["floor"]
    done = started(
        "run", path, "-p", "Hello", "-n", "4", "--memory", str(floor), "--context", "256", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["memory_peak"] <= floor


def test_chat_keeps_the_conversation_and_its_state(path: Path) -> None:
    done = lean(
        "chat", path, "--temp", "0", "-n", "6", stdin="Hello\n/reset\nHello\n/what\nAnd now?\n/exit\n"
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "prompt" in line]
    assert len(lines) == 3
    assert "Ctrl-C" in done.stderr


def test_ctrl_c_stops_one_answer_and_the_chat_goes_on(path: Path) -> None:
    master, slave = pty.openpty()
    command = [*STARTED, "chat", str(path), "--temp", "2", "--top-k", "0", "--min-p", "0", "--top-p", "1"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=subprocess.PIPE, stderr=slave, start_new_session=True
    )
    os.close(slave)
    assert process.stdout is not None
    screen = _read_until(master, b"> ")
    os.write(master, b"Hello\n")
    assert process.stdout.read1(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    screen = _read_until(master, b"> ")
    assert b"answer" in screen
    os.write(master, b"/exit\n")
    assert process.wait() == 0
    os.close(master)


def test_ctrl_c_while_the_prompt_is_computed(path: Path) -> None:
    """For a minute the screen said nothing, and what was not answered stayed in the conversation."""
    master, slave = pty.openpty()
    command = [*STARTED, "chat", str(path), "--temp", "0", "-n", "2", "--chunk", "1"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=subprocess.PIPE, stderr=slave, start_new_session=True
    )
    os.close(slave)
    _read_until(master, b"> ")
    os.write(master, b"e " * 400 + b"\n")
    seen = b""
    while b"prompt 1 of " not in seen:
        seen += os.read(master, 4096)
    process.send_signal(signal.SIGINT)
    screen = _read_until(master, b"> ")
    assert b" (stopping)" in screen
    assert b"\r\x1b[2Kstopped before the answer began; what you said is left out" in screen
    os.write(master, b"Hello\n")
    screen = _read_until(master, b"> ")
    assert int(screen.partition(b" of ")[2].split()[0]) < 100
    os.write(master, b"\x04")  # Ctrl-D
    assert process.wait() == 0
    assert os.read(master, 100).endswith(b"\r\n")
    os.close(master)


def _read_until(fd: int, mark: bytes) -> bytes:
    seen = b""
    while not seen.endswith(mark):
        seen += os.read(fd, 4096)
    return seen


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("run", "-p", "x"), "no switch for thinking"), (("run", "-p", "x", "--raw"), "--no-think needs")],
)
def test_no_think_is_refused_where_it_would_do_nothing(
    path: Path, arguments: tuple[str, ...], words: str
) -> None:
    command, *rest = arguments
    done = lean(command, path, *rest, "--no-think")
    assert done.returncode == 2
    assert words in done.stderr

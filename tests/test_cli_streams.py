"""The `lean` command with streams that are closed, full, interrupted or of another encoding."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from leanmoe.cli import pack_commands
from leanmoe.cli.main import main
from leanmoe.pack import pack_gguf

LEAN = [sys.executable, "-m", "leanmoe"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from oracles.tiny import tiny_gguf

    gguf = tiny_gguf(tmp_path_factory.mktemp("streams") / "tiny.gguf", "qwen3moe", "Q8_0").path
    return pack_gguf(gguf, gguf.with_suffix(".lmpack"))


def _shell(script: str, path: Path, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    lean = f'"{sys.executable}" -m leanmoe'
    return subprocess.run(
        ["bash", "-c", script.replace("LEAN", lean).replace("PACK", f'"{path}"')],
        capture_output=True,
        env=os.environ | environment,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("LEAN run PACK -p hi -n 3 >&-", 0, b"answer"),
        ("LEAN run PACK -p hi -n 3 2>&-", 0, b""),
        ("LEAN run PACK --raw -p - <&-", 2, b"the prompt is empty"),
        ("LEAN chat PACK <&-", 0, b""),
        ("LEAN run PACK -p hi -n 3 >/dev/full", 1, b"No space left"),
        ("LEAN run PACK -p hi -n 300 --ignore-eos | head -c 1; exit ${PIPESTATUS[0]}", 1, b""),
        ("echo hi | LEAN run PACK -n 2", 0, b"answer"),
        ("echo hi | LEAN run PACK -n 1 -f -", 0, b"answer 1 token |"),
        ("LEAN run PACK </dev/null", 2, b"the prompt is empty; give the prompt with -p TEXT"),
        ("LEAN run PACK -p hi -f /dev/null", 2, b"both -p and -f"),
        ("LEAN simulate /nonexist", 2, b"/nonexist: no such file; a routing trace was wanted"),
        (r"printf '\xff\xfe' | LEAN run PACK -p -", 2, b"standard input: not UTF-8"),
        (r"printf '\xff\xfe\n' | LEAN chat PACK -n 2", 0, b"answer"),
        ("LEAN run PACK -f /", 2, b"/: cannot be read: Is a directory"),
        (r"LEAN info $'no\nsuch\e[31mfile'", 2, rb"no\nsuch\x1b[31mfile: no such file"),
    ],
)
def test_odd_streams_end_in_an_answer_or_one_line(path: Path, script: str, code: int, says: bytes) -> None:
    """A traceback in a log, or a terminal turned red by a file's name, would be what a user sees."""
    done = _shell(script, path, PYTHONIOENCODING="utf-8:strict")
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") <= 2


def test_text_that_the_terminal_cannot_show_is_replaced(path: Path) -> None:
    done = _shell(
        "LEAN run PACK -p hi -n 40 --temp 2 --seed 1 --ignore-eos", path, PYTHONIOENCODING="ascii:strict"
    )
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout


def test_an_interrupted_run_says_so_by_its_exit_code(path: Path) -> None:
    """A script that runs lean must not take half an answer for a whole one."""
    command = [*LEAN, "run", str(path), "-p", "hi", "--ignore-eos", "--temp", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    _, account = process.communicate()
    assert process.returncode == 130
    assert b"answer" in account


def test_ctrl_c_while_lean_starts_leaves_no_traceback() -> None:
    """Half a second of imports, and a page of them on the screen."""
    script = """if True:
        import os, runpy, signal, sys
        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name == "leanmoe.cli.main":
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Slow())
        runpy.run_module("leanmoe", run_name="__main__")
    """
    # Ctrl-C is ignored in what a script runs in the background, as these tests may be.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, preexec_fn=listening)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


@pytest.mark.parametrize(
    ("command", "worker", "says"),
    [
        ("pack", "pack_gguf", "lean: interrupted; run the same command again to go on\n"),
        ("verify", "verify_pack", "lean: interrupted\n"),
        ("info", "summarize", "lean: interrupted\n"),
    ],
)
def test_ctrl_c_in_a_command_is_one_line(
    command: str, worker: str, says: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It said "Aborted.", and nothing of how to go on."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pack_commands, worker, interrupted)
    monkeypatch.setattr(sys, "argv", ["lean", command, "x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capfd.readouterr().err) == (130, says)


@pytest.mark.parametrize("command", ["", "pack", "info", "verify", "plan", "run", "chat"])
def test_help_fits_a_terminal_and_shows_the_defaults(command: str) -> None:
    """Markup once swallowed every [default: ...]."""
    done = subprocess.run(
        [*LEAN, *command.split(), "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80"},
    )
    assert max(map(len, done.stdout.splitlines())) <= 80
    if command in ("pack", "plan", "run", "chat"):
        assert "[default: " in done.stdout

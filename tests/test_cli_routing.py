"""`lean profile`, `trace`, `tune`, `map`, and what `plan`, `run` and `chat` make of them, as a user meets them."""

import json
import os
import pty
import re
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from lean_process import STARTED, lean, started
from leanmoe.experts.policy import Phase
from leanmoe.experts.trace import RoutingTrace
from leanmoe.experts.trace_csv import import_csv
from leanmoe.pack import pack_gguf, verify_pack

SMALL = ("--memory", "1GiB", "--context", "128")


@pytest.fixture
def path(tmp_path: Path, tiny_model: Callable[..., object]) -> Path:
    return pack_gguf(tiny_model("qwen3moe", "Q4_K").path, tmp_path / "m.lmpack")  # type: ignore[attr-defined]


def test_profile_reads_text_and_answers_prompts(path: Path, tmp_path: Path) -> None:
    text, prompts = tmp_path / "text", tmp_path / "prompts"
    text.write_text("The ferry left late. " * 30)  # longer than the context: read in pieces
    prompts.write_text("One?\n\nTwo?\n")
    done = started("profile", path, *SMALL, "--text", text, "--prompts", prompts, "-n", "4")
    assert done.returncode == 0, done.stderr
    read, answered = map(int, re.findall(r"(\d+) tokens read and (\d+) answered", done.stdout)[0])
    assert read > 128
    assert 1 <= answered <= 6
    assert "on the hottest 25%" in done.stdout
    assert (path / "profile").exists()
    assert verify_pack(path) == []


def test_run_and_chat_learn_unless_told_not_to(path: Path) -> None:
    assert lean("run", path, *SMALL, "-p", "Hello", "-n", "4", "--no-learn").returncode == 0
    assert not (path / "profile").exists()
    assert lean("run", path, *SMALL, "-p", "Hello", "-n", "4").returncode == 0
    assert (path / "profile").exists()


def test_map_shows_every_layer_in_the_terminal_and_as_a_picture(path: Path, tmp_path: Path) -> None:
    missing = lean("map", path, *SMALL)
    assert missing.returncode == 2
    assert f"lean profile {path}" in missing.stderr
    assert lean("profile", path, *SMALL, "-n", "4").returncode == 0
    picture = tmp_path / "map.png"
    done = started("map", path, *SMALL, "--plot", picture)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +(\d+) (.{8}) +(\d+)/8$", done.stdout, re.MULTILINE)
    assert [int(layer) for layer, _, _ in rows] == [0, 1]
    assert any(shade != " " for _, shades, _ in rows for shade in shades)
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(lean("map", path, *SMALL, "--json").stdout)
    for layer, _, held in rows:
        entry = record["layers"][layer]
        assert len(entry["resident"]) == int(held)
        assert all(entry["picks"][e] > 0 for e in entry["resident"])


def test_a_profile_of_another_model_makes_no_map(
    path: Path, tmp_path: Path, tiny_model: Callable[..., object]
) -> None:
    other = pack_gguf(tiny_model("olmoe", "Q8_0").path, tmp_path / "o.lmpack")  # type: ignore[attr-defined]
    assert lean("profile", other, *SMALL, "-n", "4").returncode == 0
    (other / "profile").rename(path / "profile")
    done = lean("map", path, *SMALL)
    assert done.returncode == 1
    assert "another model" in done.stderr


def test_trace_records_the_packs_own_or_a_file_in_either_form(path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("One?\nTwo?\n")
    arguments = (*SMALL, "--prompts", prompts, "-n", "6", "--no-learn")
    assert started("trace", path, *arguments).returncode == 0
    own = RoutingTrace.load(path / "trace")
    assert own.tokens[Phase.DECODE] > 0
    assert lean("trace", path, tmp_path / "p", *arguments, "--probabilities").returncode == 0
    wide = RoutingTrace.load(tmp_path / "p")
    assert wide.has_probabilities
    assert (wide.rows["experts"] == own.rows["experts"]).all()
    assert lean("trace", path, tmp_path / "t.csv", *arguments, "--csv").returncode == 0
    assert import_csv(tmp_path / "t.csv").picks == own.picks
    assert not (path / "profile").exists()
    done = lean("simulate", path / "trace", "--json")
    assert json.loads(done.stdout)["decode_tokens"] == own.tokens[Phase.DECODE]


def test_tune_says_why_and_plan_foretells_from_it(path: Path) -> None:
    before = lean("plan", path, *SMALL).stdout
    assert "lean tune" in before or "hit rate 100%" in before
    done = started("tune", path, *SMALL, "-n", "64")
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("reader threads", "hit rate, replayed", "chosen: --readers"))
    record = json.loads(lean("plan", path, *SMALL, "--json").stdout)["estimate"]
    assert "disk and processor as `lean tune` measured them" in record["assumes"]
    assert record["tokens_per_second"] > 0
    tuned = json.loads(lean("tune", path, *SMALL, "-n", "64", "--json").stdout)
    assert tuned["choice"]["readers"] >= 2
    assert tuned["measured"]["compute_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("profile", "--no-learn"), 2, "--no-learn"),
        (("profile", "--prompts", "EMPTY"), 1, "no prompt"),
        (("profile", "--text", "BINARY"), 1, "not UTF-8"),
        (("profile", "--text", "NOWHERE"), 1, "NOWHERE"),
        (("trace", "--csv", "--probabilities"), 2, "CSV"),
        (("run", "-p", "x", "--prefetch-level", "2"), 2, "prefetch"),
        (("run", "-p", "x", "--prefetch", "on", "--readers", "1"), 2, "readers"),
        (("run", "-p", "x", "--policy", "best"), 2, "policy"),
    ],
)
def test_what_cannot_be_done_is_said(
    path: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    (tmp_path / "EMPTY").write_text("\n \n")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe")
    command, *rest = arguments
    files = [str(tmp_path / a) if a.isupper() else a for a in rest]
    done = lean(command, path, *SMALL, *files)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_live_figures_stand_below_the_text_and_are_gone_afterwards(path: Path) -> None:
    """On a terminal the last row shows them; the scrolling region and the row are given back at the end."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    process = subprocess.Popen(
        [*STARTED, "run", path, *SMALL, "-p", "Hello", "-n", "40", "--ignore-eos", "--stats"],
        stdout=slave,
        stderr=slave,
        stdin=subprocess.DEVNULL,
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(master)
    assert process.wait(60) == 0
    text = shown.decode(errors="replace")
    assert re.search(r"\x1b7\x1b\[1;\d+r\x1b8", text)
    assert "tokens" in text
    assert text.rindex("\x1b[r") > text.rindex("\x1b[7m")
    assert "waited for reads" in text  # the table at the end


def test_live_figures_in_a_file_are_lines(path: Path) -> None:
    done = lean("run", path, *SMALL, "-p", "Hello", "-n", "8", "--ignore-eos", "--stats")
    assert "\x1b" not in done.stderr
    assert re.search(r"^\d+ tokens", done.stderr, re.MULTILINE)


def test_live_figures_do_not_cut_into_the_text_where_both_go_to_one_file(path: Path) -> None:
    done = subprocess.run(
        [*STARTED, "run", str(path), *SMALL, "-p", "Hello", "-n", "8", "--ignore-eos", "--stats"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    assert "waited for reads" in done.stdout
    assert not re.search(r"\d+ tokens( \||$)", done.stdout, re.MULTILINE)


def test_chat_shows_the_map_of_what_is_resident(path: Path) -> None:
    done = lean("chat", path, *SMALL, "-n", "4", stdin="Hello\n/map\n")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^ +\d+ .{8} +\d+/8$", done.stderr, re.MULTILINE)

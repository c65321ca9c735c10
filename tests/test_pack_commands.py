"""`lean pack`, `lean info` and `lean verify` as a user types them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from gguf_fixtures import write_moe_gguf
from leanmoe.cli.pack_commands import info, pack, verify
from leanmoe.cli.plan import plan
from leanmoe.errors import FormatError, UnsupportedError, UsageError
from oracles.rewrite import rewritten

app = typer.Typer()
for command in (pack, info, verify, plan):
    app.command()(command)


def lean(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    needed = {"qwen3moe.attention.head_count": 4, "qwen3moe.expert_feed_forward_length": 32}
    return write_moe_gguf(tmp_path / "tiny.gguf", layers=3, nextn=1, extras=True, keys=needed)


def test_pack_names_the_pack_it_made(tmp_path: Path, source: Path) -> None:
    """A script could not go on with the result of `lean pack`."""
    result = lean("pack", source)
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "tiny.lmpack")
    assert lean("pack", source, tmp_path / "other.lmpack").exit_code == 0
    assert (tmp_path / "other.lmpack" / "manifest.json").exists()


def test_pack_consume_deletes_the_source(tmp_path: Path, source: Path) -> None:
    """The flag would do nothing."""
    assert lean("pack", source, "--consume").exit_code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.lmpack"]


def test_info_says_the_same_of_a_gguf_and_its_pack(tmp_path: Path, source: Path) -> None:
    """One could not judge a model before packing it."""
    lean("pack", source)
    bare = json.loads(lean("info", "--json", source).stdout)
    packed = json.loads(lean("info", "--json", tmp_path / "tiny.lmpack").stdout)
    assert (bare.pop("packed"), packed.pop("packed")) == (False, True)
    assert bare.pop("path") != packed.pop("path")
    assert bare == packed
    assert (bare["architecture"], bare["layers"], bare["experts"], bare["top_k"]) == ("qwen3moe", 2, 4, 2)
    assert (bare["context_length"], bare["chat_template"], bare["name"]) == (128, True, "tiny")
    assert bare["expert_bytes_min"] == bare["expert_bytes_max"] == 8192
    shown = lean("info", source).stdout
    for words in ("qwen3moe", "4 a layer, top-2", "Q8_0", "128", "chat template"):
        assert words in shown


def test_info_on_a_dense_model(tmp_path: Path) -> None:
    """Dense models would be shown with experts, or not at all."""
    assert "none (dense)" in lean("info", write_moe_gguf(tmp_path / "m.gguf", experts=0)).stdout


def test_verify_lists_faults_and_fails(tmp_path: Path, source: Path) -> None:
    """A script would take a damaged pack for sound."""
    lean("pack", source)
    out = tmp_path / "tiny.lmpack"
    result = lean("verify", out)
    assert (result.exit_code, "no faults" in result.stdout) == (0, True)
    (out / "experts/001/001").unlink()
    (out / "experts/000/003").write_bytes(b"")
    result = lean("verify", out)
    assert result.exit_code == 1
    assert "experts/001/001: missing" in result.stdout
    assert "experts/000/003: 0 bytes long" in result.stdout
    assert "2 faults" in result.stdout
    assert "delete the pack and make it again" in result.stdout


def test_a_pack_is_never_the_advice_to_delete_it(tmp_path: Path, source: Path) -> None:
    """`lean pack model.lmpack` said: already exists; delete it."""
    lean("pack", source)
    told = str(lean("pack", tmp_path / "tiny.lmpack").exception)
    assert "is a pack already" in told
    assert "delete" not in told
    assert "such a pack already" in str(lean("pack", source).exception)
    assert "a checkpoint has one" in str(lean("pack", tmp_path).exception)


def test_an_unfinished_pack_is_called_so(tmp_path: Path) -> None:
    """`lean info` said that there was no such file."""
    (tmp_path / "a.lmpack.partial").mkdir()
    for command in (info, plan):
        assert "not finished" in str(lean(command.__name__, tmp_path / "a.lmpack").exception)


def test_one_tensor_is_not_called_1_tensors(tmp_path: Path) -> None:
    path = write_moe_gguf(tmp_path / "m.gguf", layers=1, experts=0, skip=("blk.0.ffn_down.weight",))
    shown = lean("info", path).stdout
    assert "Q8_0: 1 tensor, " in shown
    assert "F32: 4 tensors, " in shown


def test_equal_sizes_are_said_once(source: Path) -> None:
    line = next(line for line in lean("info", source).stdout.splitlines() if line.startswith("one expert"))
    assert line.split(maxsplit=2)[2].strip() == "8.0 KiB"


def test_errors_reach_the_entry_point_as_they_are(tmp_path: Path, source: Path) -> None:
    """Mistakes would end in a traceback or in the wrong exit code."""
    assert isinstance(lean("pack", tmp_path / "none.gguf").exception, UsageError)
    source.write_bytes(b"GGUF")
    assert isinstance(lean("info", source).exception, FormatError)
    assert isinstance(lean("verify", source).exception, UsageError)


def test_a_model_that_lean_cannot_run_is_not_packed(tmp_path: Path) -> None:
    """Copying 242 GB, and freeing the source, only to hear that the architecture is unknown."""
    strange = write_moe_gguf(tmp_path / "strange.gguf", arch="frobnicate")
    result = lean("pack", strange, "--consume")
    assert isinstance(result.exception, UnsupportedError)
    assert "frobnicate" in str(result.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["strange.gguf"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.pre": "nobody's"}, "nobody's"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "tokenizer"),
    ],
)
def test_nor_is_one_whose_tokenizer_it_cannot_use(
    tiny_model: Callable[..., Any], tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    """Only `lean run` said so, after the copying, when the source was gone."""
    path = rewritten(tiny_model("qwen3moe").path, tmp_path / "strange.gguf", keys)
    refused = lean("pack", path, "--consume").exception
    assert isinstance(refused, UnsupportedError | FormatError)
    assert says in str(refused)
    assert str(path) in str(refused)
    assert [p.name for p in tmp_path.iterdir()] == ["strange.gguf"]

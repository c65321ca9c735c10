"""Checkpoints with absurd settings: one line that names the file, at once; never a traceback, a hang or all memory."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leanmoe.convert import CheckpointSource
from leanmoe.errors import FormatError, LeanError, UsageError
from leanmoe.pack import open_pack, pack_source
from oracles.checkpoint import tiny_checkpoint

HUGE = 4294967295


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small checkpoint of an architecture, made once."""
    made: dict[str, Path] = {}

    def make(arch: str) -> Path:
        if arch not in made:
            made[arch] = tiny_checkpoint(tmp_path_factory.mktemp("published") / arch, arch).path
        return made[arch]

    return make


def changed(source: Path, folder: Path, name: str, **values: Any) -> Path:
    """The checkpoint with other values in one of its JSON files."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    document = json.loads((source / name).read_text()) | values
    (folder / name).unlink()
    (folder / name).write_text(json.dumps(document))
    return folder


def _yarn(**values: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", **values}}


@pytest.mark.parametrize(
    ("arch", "values", "says"),
    [
        ("qwen3moe", {"num_attention_heads": 0}, "num_attention_heads is 0; a number from 1"),
        ("qwen3moe", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("qwen3moe", {"num_hidden_layers": HUGE}, "num_hidden_layers is 4294967295"),
        ("qwen3moe", {"vocab_size": HUGE}, "vocab_size is 4294967295"),
        (
            "qwen3moe",
            {"vocab_size": 300},
            "tokenizer has 300 tokens, but the checkpoint has embeddings of 288",
        ),
        ("qwen3moe", {"num_experts": 0, "num_local_experts": 0}, "num_(local_)?experts is 0"),
        ("qwen3moe", {"rms_norm_eps": -1.0}, r"rms_norm_eps is -1\.0"),
        ("qwen3moe", {"rms_norm_eps": 0.0}, r"rms_norm_eps is 0\.0"),
        ("qwen3moe", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ("qwen3moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3moe", {"rope_parameters": {"partial_rotary_factor": -1}}, "partial_rotary_factor is -1"),
        ("qwen3moe", _yarn(factor=0, attention_factor=1), r"factor is 0\.0"),
        ("qwen3moe", _yarn(factor=4.5399929762484854e-05, attention_factor=1), "factor is 4.5"),
        ("qwen35moe", {"full_attention_interval": 0}, "full_attention_interval is 0"),
        ("qwen35moe", {"layer_types": [["x"], 1, 2, 3]}, "layer_types"),
        ("qwen35moe", {"linear_value_head_dim": HUGE}, "do not fit"),
        ("gemma4", {"num_hidden_layers": HUGE}, "num_hidden_layers is 4294967295"),
        ("gemma4", {"layer_types": [{}]}, "layer_types is"),
        ("gemma4", {"global_head_dim": HUGE}, "cannot be turned"),
    ],
)
def test_a_setting_that_no_model_has_is_named(
    arch: str, values: dict[str, Any], says: str, published: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each of these once was a traceback, took gigabytes of memory, or made a model that answers nonsense."""
    folder = changed(published(arch), tmp_path / "odd", "config.json", **values)
    with pytest.raises(LeanError, match=says) as refused:
        CheckpointSource(folder)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "added tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": {"content": "\ud800"}}}, "added tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9999999": {"content": "x"}}}, "id 9999999"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template is '5'"),
        ("tokenizer_config.json", {"chat_template": "\ud800"}, r"chat_template: the value '\\ud800'"),
        ("tokenizer.json", {"added_tokens": [{"content": "x"}]}, "added tokens"),
        ("tokenizer.json", {"added_tokens": [{"id": 3, "content": 7, "special": True}]}, "added tokens"),
        ("tokenizer.json", {"post_processor": {"processors": [5]}}, "post_processor"),
        ("tokenizer.json", {"post_processor": [5]}, "post_processor"),
    ],
)
def test_a_damaged_tokenizer_is_named(
    name: str, values: dict[str, Any], says: str, published: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nobody knows from a KeyError which of ten files is broken."""
    if name == "tokenizer.json":  # of the kind that the tokenizers library is not asked about
        model = json.loads((published("qwen3moe") / name).read_text())["model"]
        values = {**values, "model": model | {"byte_fallback": True}}
    folder = changed(published("qwen3moe"), tmp_path / "odd", name, **values)
    with pytest.raises(LeanError, match=says) as refused:
        CheckpointSource(folder)
    assert str(folder) in str(refused.value)


def test_a_chat_template_that_is_no_text_is_named(published: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(published("qwen3moe"), tmp_path / "odd", "config.json")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(FormatError, match=r"chat_template\.jinja: is no text"):
        CheckpointSource(folder)


def test_a_pipe_in_place_of_a_shard_is_not_waited_for(
    published: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = changed(published("qwen3moe"), tmp_path / "odd", "config.json")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(FormatError, match=r"model\.safetensors: is missing, or is no regular file"):
        CheckpointSource(folder)


def test_going_on_with_another_quantisation_says_so(published: Callable[[str], Path], tmp_path: Path) -> None:
    """The message listed every shard twice, and called the same checkpoint another."""

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    source, out = published("qwen3moe"), tmp_path / "m.lmpack"
    with pytest.raises(KeyboardInterrupt):
        pack_source(CheckpointSource(source, "q8_0"), out, progress=stop)
    with pytest.raises(FormatError, match="another --quant") as refused:
        pack_source(CheckpointSource(source, "q4_0"), out)
    assert len(str(refused.value)) < 400
    pack_source(CheckpointSource(source, "q8_0"), out)


def test_a_checkpoint_given_as_a_pack_is_recognised(published: Callable[[str], Path]) -> None:
    """It was told to pack a GGUF that the user does not have."""
    with pytest.raises(UsageError, match=r"is a checkpoint, not a pack; make one with: lean pack .*--quant"):
        open_pack(published("qwen3moe"))

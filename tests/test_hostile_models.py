"""Models that contradict themselves, in their metadata, tensors or packs: an error by name, never wrong text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanmoe import LLM
from leanmoe.errors import FormatError, LeanError, UnsupportedError
from leanmoe.pack import pack_gguf
from oracles.rewrite import Tensors, rewritten


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from oracles.tiny import tiny_gguf

    return tiny_gguf(tmp_path_factory.mktemp("hostile") / "tiny.gguf", "qwen3moe", "F32").path


def _rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def _first_rows(count: int, *names: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({n: (tensors[n][0][:count], tensors[n][1]) for n in names})


def _with_extra(tensors: Tensors) -> None:
    tensors["blk.0.attn_sinks.weight"] = tensors["blk.0.attn_norm.weight"]


@pytest.mark.parametrize(
    ("keys", "change", "says"),
    [
        ({"block_count": 1}, None, "blk.1"),
        ({"nextn_predict_layers": 1}, None, "nextn"),
        ({"expert_feed_forward_length": 16}, None, "gates of"),
        ({}, _with_extra, "attn_sinks"),
        ({}, _rename("output_norm.weight", "odd\nname"), "output_norm"),
        ({}, _rename("blk.1.attn_norm.weight", "blk.x"), "attn_norm"),
        ({}, lambda t: t.pop("blk.1.ffn_gate_inp.weight"), "layer 1"),
        ({}, lambda t: [t.pop(n) for n in list(t) if n.startswith("blk.1.") and "exps" in n], "layer 1"),
        ({}, _first_rows(4, "blk.0.ffn_gate_inp.weight"), "ffn_gate_inp"),
        ({}, _first_rows(200, "token_embd.weight", "output.weight"), "tokens"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, None, r"layer_norm_rms_epsilon is 0\.0; wanted more"),
        ({"attention.layer_norm_rms_epsilon": -1e-6}, None, "layer_norm_rms_epsilon is -"),
        ({"attention.layer_norm_rms_epsilon": 1.0}, None, r"layer_norm_rms_epsilon is 1\.0"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, None, "layer_norm_rms_epsilon"),
        ({"attention.layer_norm_rms_epsilon": float("inf")}, None, "layer_norm_rms_epsilon"),
        ({"tokenizer.ggml.model": "bert"}, None, "bert"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, None, "tokenizer"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused_by_file(
    source: Path, tmp_path: Path, keys: dict[str, Any], change: Callable[[Tensors], object] | None, says: str
) -> None:
    """Each of these once answered with text of a network that the file does not describe, or with a traceback."""
    path = rewritten(source, tmp_path / "m.gguf", keys, change or (lambda t: None))
    with pytest.raises((FormatError, UnsupportedError), match=says) as refused:
        LLM(pack_gguf(path, tmp_path / "m.lmpack"))
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"ssm.group_count": 3}, "4 value heads cannot share 3"),
        ({"ssm.inner_size": 66}, "a width of 66"),
        ({"ssm.state_size": 8}, r"blk\.0\..*wanted"),
        ({"ssm.conv_kernel": 3}, "ssm_conv1d"),
        ({"ssm.time_step_rank": 2}, r"blk\.0\..*wanted"),
        ({"full_attention_interval": 2}, r"blk\.1\.attn_q"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
    ],
)
def test_a_delta_net_that_contradicts_its_metadata_is_refused_by_file(
    tiny_model: Callable[..., Any], tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    path = rewritten(tiny_model("qwen35moe").path, tmp_path / "m.gguf", keys)
    with pytest.raises(FormatError, match=says) as refused:
        LLM(pack_gguf(path, tmp_path / "m.lmpack"))
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("arch", "key", "says"),
    [
        (
            "llama",
            "feed_forward_length",
            r"llama\.feed_forward_length is 1073741824, but blk\.0\.ffn_up\.weight has 96 rows",
        ),
        (
            "glm4moe",
            "feed_forward_length",
            r"feed_forward_length is 1073741824, but blk\.0\.ffn_up\.weight has 96 rows",
        ),
        (
            "qwen2moe",
            "expert_shared_feed_forward_length",
            r"width is 1073741824, but blk\.0\.ffn_up_shexp\.weight has 64 rows",
        ),
    ],
)
def test_a_width_that_contradicts_the_tensors_is_no_matter_of_memory(
    tiny_model: Callable[..., Any], tmp_path: Path, arch: str, key: str, says: str
) -> None:
    """The answer was to take a larger budget, of terabytes."""
    path = rewritten(tiny_model(arch).path, tmp_path / "m.gguf", {key: 1 << 30})
    with pytest.raises(FormatError, match=says) as refused:
        LLM(pack_gguf(path, tmp_path / "m.lmpack"))
    assert str(tmp_path) in str(refused.value)


def test_weights_that_are_no_numbers_end_the_answer(source: Path, tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        data, kind = tensors["blk.0.attn_norm.weight"]
        tensors["blk.0.attn_norm.weight"] = (np.full_like(data, np.nan), kind)

    path = rewritten(source, tmp_path / "m.gguf", {}, spoil)
    with LLM(pack_gguf(path, tmp_path / "m.lmpack")) as llm, pytest.raises(LeanError, match="not finite"):
        llm.generate("Hello", max_tokens=2)

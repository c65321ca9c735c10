"""Random models of public shapes: true to the shape in every byte count, and routing as on real text."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest

from leanmoe import LLM
from leanmoe.bench.make_model import main, make_model, make_text
from leanmoe.bench.random_model.blocks import random_rows
from leanmoe.bench.random_model.locality import Walk
from leanmoe.bench.random_model.shapes import SHAPES
from leanmoe.errors import UsageError
from leanmoe.experts.policy import Phase, policy_named
from leanmoe.experts.recorder import TraceRecorder
from leanmoe.experts.simulate import plan_for, replay
from leanmoe.experts.trace import PHASES, LayerFacts, RoutingTrace
from leanmoe.formats.gguf import GGUFFile, read_gguf
from leanmoe.formats.quant_types import quant_type
from leanmoe.models.registry import model_spec, supported_architectures
from leanmoe.pack import expert_layouts, is_expert_tensor, open_pack, pack_gguf, verify_pack
from leanmoe.text.tokenizer import Tokenizer
from oracles.llama_cpp import LlamaCpp
from random_models import FAMILIES, scaled_down

# Published Q4_K_M files: bytes of one expert where down has few bits and many, the layers of each, and GiB of all.
EXPERTS = {
    "qwen3.5-35b-a3b": (1769472, 2039808, 20, 40, 18.16),
    "qwen3-next-80b-a3b": (1769472, 2039808, 24, 48, 43.6),
    "qwen3.5-122b-a10b": (5308416, 6119424, 24, 48, 65.4),
    "qwen3.5-397b-a17b": (7077888, 8159232, 30, 60, 218.0),
    "qwen3-30b-a3b": (2654208, 3059712, 24, 48, 16.35),
    "qwen3-235b-a22b": (10616832, 12238848, 46, 94, 127.9),
    "qwen3-coder-480b-a35b": (26542080, 30597120, 30, 62, 263.3),
    "glm-4.5-air": (10452992, 12615680, 22, 46, 63.0),
    "glm-4.6": (13271040, 15298560, 43, 90, 191.0),
    "glm-4.7-flash": (5308416, 6119424, 22, 46, 15.6),
    "minimax-m2": (7962624, 9179136, 30, 62, 126.4),
    "deepseek-v3": (24772608, 28557312, 27, 58, 366.9),
    "kimi-k2": (24772608, 28557312, 29, 60, 570.8),
    "mixtral-8x7b": (99090432, 114229248, 16, 32, 25.4),
    "olmoe-1b-7b": (3538944, 4079616, 8, 16, 3.63),
    "gpt-oss-20b": (13253760, 13253760, 24, 24, 9.5),
    "gpt-oss-120b": (13253760, 13253760, 36, 36, 56.9),
}
# In these files the layer for multi-token prediction counts among those with experts.
WITH_PREDICTION = ("glm-4.5-air", "glm-4.6")
PROMPT = "The harbour was quiet before six."


def _header(tmp_path: Path, shape: str, **options: bool) -> GGUFFile:
    make_model(shape, tmp_path / "model.gguf", header_only=True, **options)
    return read_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("shape", EXPERTS)
def test_a_header_has_the_experts_of_the_published_file_and_takes_no_room(shape: str, tmp_path: Path) -> None:
    """What lean plans for a large model would not be what the model takes."""
    few, many, high, layers, total = EXPERTS[shape]
    model = _header(tmp_path, shape, prediction=shape in WITH_PREDICTION)
    sizes: dict[str, int] = {}
    for tensor in model.tensors.values():
        if is_expert_tensor(tensor.name):
            layer = tensor.name.split(".")[1]
            sizes[layer] = sizes.get(layer, 0) + tensor.nbytes // SHAPES[shape].experts
    found = sorted(sizes.values())
    assert found == sorted([many] * high + [few] * (layers - high))
    assert sum(found) * SHAPES[shape].experts / 2**30 == pytest.approx(total, rel=0.01)
    assert model.path.stat().st_blocks * 512 < 16 << 20
    skipped = 1 if shape in WITH_PREDICTION else 0
    assert len(expert_layouts(model).layers) == layers - skipped
    if model.architecture in supported_architectures():
        spec = model_spec(model)
        assert (spec.layers, spec.hidden) == (SHAPES[shape].layers, SHAPES[shape].hidden)


def test_names_that_exclude_each_other_and_files_in_the_way_are_refused(tmp_path: Path) -> None:
    """A benchmark would measure another model than the one that was asked for."""
    out = tmp_path / "model.gguf"
    for options in (
        dict(layers=99),
        dict(layers=0),
        dict(prediction=True),
        dict(pack=True, header_only=True),
        dict(experts=3),
        dict(experts=-64),
        dict(experts=1 << 20),
    ):
        with pytest.raises(UsageError):
            make_model("tiny", out, **options)
    with pytest.raises(UsageError, match="qwen3-30b-a3b"):
        make_model("qwen3-3b", out)
    with pytest.raises(UsageError, match="uses 4, and 4 layers may have up to 65536"):
        make_model("tiny", out, experts=0)
    for experts in (100, 8):
        with pytest.raises(UsageError, match="wanted a multiple of 8, at least 16"):
            make_model("deepseek-v3", out, experts=experts)
    make_model("tiny", out, header_only=True)
    with pytest.raises(UsageError, match="already exists"):
        make_model("tiny", out)


TYPES = (
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q8_0",
    "Q5_0",
    "Q5_1",
    "Q4_0",
    "Q4_1",
    "IQ4_NL",
    "MXFP4",
    "F16",
    "BF16",
    "F32",
)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("std", [1.0, 0.003])
def test_random_blocks_have_the_deviation_asked_for_and_no_bias(name: str, std: float) -> None:
    """Activations would grow or vanish from layer to layer, and routing with them."""
    rng = np.random.default_rng(0)
    raw = random_rows(rng, quant_type(name), 256, 1024, std)
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert values.shape == (256, 1024)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(std, rel=0.05)
    assert abs(values.mean()) < 0.01 * std
    assert np.abs(values.mean(axis=1)).max() < 0.2 * std  # 6 times what chance gives


def test_a_pack_written_directly_is_the_pack_of_the_file(tmp_path: Path) -> None:
    """lean and its rival would be compared on different models."""
    options = dict(layers=2, locality=True, seed=3)
    make_model("tiny", tmp_path / "model.gguf", **options)
    pack_gguf(tmp_path / "model.gguf", tmp_path / "packed.lmpack")
    make_model("tiny", tmp_path / "direct.lmpack", pack=True, **options)
    assert verify_pack(tmp_path / "direct.lmpack") == []
    packed, direct = (open_pack(tmp_path / f"{name}.lmpack").digests for name in ("packed", "direct"))
    assert [n for n in packed if packed[n] != direct[n]] == ["manifest.json"]  # the source's name
    make_model("tiny", tmp_path / "other.lmpack", pack=True, **(options | dict(seed=4)))
    other = open_pack(tmp_path / "other.lmpack").digests
    assert not set(other.values()) & set(direct.values())


@pytest.mark.parametrize("locality", [True, False])
def test_with_another_number_of_experts_a_token_still_uses_the_same_bytes(
    locality: bool, tmp_path: Path
) -> None:
    """Time against the number of experts would be measured with more or larger ones used, or in other types."""
    packs = {}
    for experts in (8, 64, 100):  # for 8 a mixture has other types, if that is what a model is published with
        path = tmp_path / f"{experts}.lmpack"
        walk = make_model("tiny", path, pack=True, layers=2, experts=experts, locality=locality).walk
        assert verify_pack(path) == []
        packs[experts] = open_pack(path)
        with LLM(path, context=64) as llm:
            assert llm.spec.router is not None
            assert (llm.spec.router.experts, llm.spec.router.top_k) == (experts, SHAPES["tiny"].top_k)
            tokens = llm.generate([7], max_tokens=12, temperature=0, ignore_eos=True).tokens
            assert walk is None or tokens == _follow(walk, 7, 12)
            assert llm.stats.total.lookups == 2 * SHAPES["tiny"].top_k * (1 + len(tokens) - 1)

    def used(experts: int) -> tuple[object, ...]:
        manifest, trunk = packs[experts].manifest, packs[experts].trunk
        kept = {n: (t.ne, t.qtype) for n, t in trunk.tensors.items() if not n.endswith("gate_inp.weight")}
        return kept, [m.layout for m in manifest.layers], manifest.expert_used_count

    assert used(8) == used(64) == used(100)
    assert [len(list((pack.path / "experts" / "000").iterdir())) for pack in packs.values()] == [8, 64, 100]
    make_model("tiny", tmp_path / "tiny.lmpack", pack=True, layers=2, locality=locality)
    published, same = open_pack(tmp_path / "tiny.lmpack"), packs[64]
    assert [published.expert_digest(1, e) for e in range(64)] == [same.expert_digest(1, e) for e in range(64)]


def test_the_command_makes_a_pack_that_lean_runs(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "leanmoe.bench.make_model",
        "tiny",
        "tiny.lmpack",
        "--pack",
        "--layers",
        "2",
        "--experts",
        "24",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "COLUMNS": "80"})
    with LLM(tmp_path / "tiny.lmpack", context=128) as llm:
        assert [m.expert_count for m in llm.pack.manifest.layers] == [24, 24]
        text = "Töken 42, and a\nnew line"
        assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text
        logits = llm.logits(llm.tokenizer.encode(PROMPT))
    assert 1 < float(logits.std()) < 4


@pytest.mark.parametrize("name", FAMILIES)
def test_any_engine_walks_through_the_vocabulary_in_the_designed_order(name: str, tmp_path: Path) -> None:
    """Two engines would be measured on different tokens, and so on different experts."""
    shape = scaled_down(name)
    walk = make_model(shape, tmp_path / "model.gguf", locality=True).walk
    assert walk is not None
    with LlamaCpp(tmp_path / "model.gguf", n_ctx=256) as reference:
        prompt = reference.tokenize(PROMPT)
        wanted = _follow(walk, prompt[-1], 48)
        assert reference.generate(prompt, 48) == wanted
    if shape.architecture in supported_architectures():
        pack_gguf(tmp_path / "model.gguf", tmp_path / "model.lmpack", consume=True)
        with LLM(tmp_path / "model.lmpack", context=128) as llm:
            assert llm.generate(prompt, max_tokens=48, temperature=0, ignore_eos=True).tokens == wanted


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--text", "9", "--pack"], "--pack is of models"),
        (["--text", "9", "--header-only"], "--header-only is of models"),
        (["--text", "9", "--layers", "2"], "--layers is of models"),
        (["--text", "0"], "wanted at least 1"),
        (["--text", "-3"], "wanted at least 1"),
    ],
)
def test_options_that_a_text_has_no_use_for_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], says: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_model", "qwen3-30b-a3b", str(tmp_path / "text"), *options])
    with pytest.raises(UsageError, match=says):
        main()
    assert not (tmp_path / "text").exists()


def test_text_has_a_token_for_each_word_in_any_engine(tmp_path: Path) -> None:
    """A prompt of letters would be routed as nothing that anybody writes: the same few tokens again and again."""
    path, shape = tmp_path / "model.gguf", scaled_down("qwen3-30b-a3b")
    walk = make_model(shape, path, locality=True, layers=1).walk
    assert walk is not None
    text = make_text(shape, 300)
    tokens = Tokenizer.from_metadata(read_gguf(path).metadata).encode(text)
    assert len(tokens) == 300
    assert len({*tokens}) > 150
    with LlamaCpp(path, n_ctx=64) as reference:
        assert reference.tokenize(text) == tokens
    following = sum(walk.successor(a) == b for a, b in pairwise(tokens))
    assert following > 150  # what is between two words are bytes and syllables


def _follow(walk: Walk, token: int, count: int) -> list[int]:
    tokens = [token]
    for _ in range(count):
        tokens.append(walk.successor(tokens[-1]))
    return tokens[1:]


def _decode_trace(path: Path, tokens: int) -> RoutingTrace:
    """What lean's router picks while it decodes `tokens` tokens."""
    manifest = open_pack(path).manifest
    layers = {m.layer: LayerFacts(m.expert_count, m.layout.file_bytes) for m in manifest.layers}
    recorder = TraceRecorder("model", manifest.architecture, manifest.expert_used_count, layers)
    with LLM(path, context=tokens + 64, observers=[recorder]) as llm:
        llm.generate(PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True)
    trace = recorder.trace()
    return trace.only(trace.rows["phase"] == PHASES.index(Phase.DECODE))


@pytest.mark.parametrize("locality", [True, False])
def test_routing_has_the_locality_of_real_text(locality: bool, tmp_path: Path) -> None:
    """Hit rates of a comparison would mean nothing. The real ones: 56 and 80 % at 12 and 24 % residency."""
    rates = []
    for seed in (1, 2):
        path = tmp_path / f"{seed}.lmpack"
        make_model("tiny", path, pack=True, locality=locality, seed=seed)
        trace = _decode_trace(path, 256)
        budgets = (int(trace.expert_bytes * share) for share in (0.12, 0.24))
        requests = list(trace.requests())
        rates.append([replay(requests, plan_for(trace, b), policy_named("lru")).hit_rate for b in budgets])
    low, high = np.mean(rates, axis=0)
    print(f"hit rates at 12 and 24 %: {low:.3f}, {high:.3f}")
    if locality:
        assert low == pytest.approx(0.56, abs=0.05)
        assert high == pytest.approx(0.80, abs=0.05)
    else:
        assert low < 0.35


# As wide as the real one where that matters to routing.
WIDE = replace(SHAPES["qwen3-30b-a3b"], vocab=16384, expert_width=64)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, 6, 16, 48])
def test_locality_is_the_same_in_a_large_model_and_for_any_number_of_layers(
    layers: int, tmp_path: Path
) -> None:
    """A calibration for the tiny model alone would not say anything of the models that are measured."""
    path = tmp_path / "model.lmpack"
    make_model(WIDE, path, layers=layers, pack=True, locality=True)
    trace = _decode_trace(path, 192)
    requests = list(trace.requests())
    for share, wanted in ((0.12, 0.56), (0.24, 0.80)):
        plan = plan_for(trace, int(trace.expert_bytes * share))
        assert replay(requests, plan, policy_named("lru")).hit_rate == pytest.approx(wanted, abs=0.05)


@pytest.mark.slow
def test_a_prompt_of_text_is_routed_as_a_real_one(tmp_path: Path) -> None:
    """Recorded from Qwen3-30B-A3B and Gemma-4-26B-A4B, the best 6 of 128: 32 tokens used 45.8 and 48.4 experts of a
    layer, 128 tokens 75.3 and 76.9, and each further one more. The next layer's router foresees 80 to 90 % of picks."""
    path, text = tmp_path / "model.lmpack", make_text(WIDE, 1024)
    make_model(WIDE, path, layers=16, pack=True, locality=True)
    with LLM(path, context=1100, recording=64 << 20) as llm:
        recall = llm.decoder.judge_look_ahead([8], 1)
        llm.generate(text, max_tokens=128, temperature=0, ignore_eos=True)
        assert 0.8 < recall.recall()[1][0] < 0.93
    rows = llm.trace().rows
    picks = [rows["experts"][rows["layer"] == layer, :6][:1024] for layer in range(16)]

    def used(window: int) -> float:
        return float(
            np.mean([len(np.unique(p[i : i + window])) for p in picks for i in range(0, 1024, window)])
        )

    print(f"experts used by 32, 128 and 1024 tokens: {used(32):.1f}, {used(128):.1f}, {used(1024):.1f}")
    assert used(32) == pytest.approx(47, abs=6)
    assert used(128) == pytest.approx(76, abs=8)
    assert used(1024) > 110

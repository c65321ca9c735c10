"""The network: equal to transformers and llama.cpp, and independent of what happens to be resident."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from leanmoe import LLM
from leanmoe.experts.policy import POLICIES
from leanmoe.models.batch import Batch
from leanmoe.pack import open_pack, pack_gguf

ARCHITECTURES = ["qwen3moe", "qwen2moe", "olmoe", "mixtral", "llama", "qwen2", "qwen3"]
MOE = ARCHITECTURES[:4]
TOKENS = Random(7).choices(range(280), k=96)

PackTiny = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Any]) -> PackTiny:
    """Makes a tiny model and its pack once for each set of arguments."""
    made: dict[Path, Path] = {}

    def make(arch: str, quant: str = "F32", **overrides: object) -> tuple[Any, Path]:
        tiny = tiny_model(arch, quant, **overrides)
        if tiny.path not in made:
            made[tiny.path] = pack_gguf(tiny.path, tmp_path_factory.mktemp("packs") / "tiny.lmpack")
        return tiny, made[tiny.path]

    return make


def _floor(path: Path, devices: int = 1) -> int:
    """Bytes of the fewest slots that work: one layer's top-k twice, on each device."""
    manifest = open_pack(path).manifest
    return devices * max(m.layout.file_bytes for m in manifest.layers) * 2 * manifest.expert_used_count


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_equal_those_of_transformers(arch: str, packed: PackTiny) -> None:
    """A user would otherwise run a slightly different model from the one its authors trained."""
    from oracles import hf

    tiny, path = packed(arch)
    want = hf.logits(tiny.hf_model, TOKENS)
    with LLM(path, kv_type="f32") as llm:
        whole = llm.logits(TOKENS).numpy()
    with LLM(path, kv_type="f32", chunk=7) as llm:
        in_chunks = llm.logits(TOKENS).numpy()
    with LLM(path, kv_type="f32", chunk=1) as llm:
        one_by_one = llm.logits(TOKENS).numpy()
    for got in (whole, in_chunks, one_by_one):
        assert np.abs(got - want).max() <= 1e-3 * want.std()


@pytest.mark.parametrize("arch", MOE)
def test_streamed_equals_resident_bit_for_bit(arch: str, packed: PackTiny) -> None:
    """Otherwise the answer would depend on how much memory the machine had."""
    _, path = packed(arch, "Q8_0")
    with LLM(path) as llm:
        assert llm.plan.residency == 1.0
        resident = llm.logits(TOKENS)
        again = llm.logits(TOKENS)
        decoded = _decode(llm, TOKENS[:40])
    assert torch.equal(resident, again)
    with LLM(path, cache=_floor(path)) as llm:
        assert llm.plan.residency < 1.0
        streamed = llm.logits(TOKENS)
        streamed_decoded = _decode(llm, TOKENS[:40])
        assert llm.stats.evictions > 0
    assert torch.equal(streamed, resident)
    assert torch.equal(streamed_decoded, decoded)


@pytest.mark.parametrize("prefetch", ["off", "auto", "on"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_and_no_prefetch_changes_a_bit(policy: str, prefetch: Any, packed: PackTiny) -> None:
    """What is kept and what is read ahead may change the time of an answer, never the answer."""
    _, path = packed("qwen3moe", "Q8_0", num_hidden_layers=6)
    with LLM(path) as llm:
        resident, decoded = llm.logits(TOKENS[:48]), _decode(llm, TOKENS)
    with LLM(path, cache=2 * _floor(path), policy=policy, prefetch=prefetch) as llm:
        assert llm.plan.residency < 1.0
        assert torch.equal(llm.logits(TOKENS[:48]), resident)
        assert torch.equal(_decode(llm, TOKENS), decoded)
        assert llm.stats.evictions > 0
        assert (llm.stats.prefetch.issued > 0) == (prefetch != "off")


@pytest.mark.parametrize("arch", MOE)
@pytest.mark.parametrize("predictor", ["gate", "transitions", "both"])
def test_no_predictor_changes_a_bit(arch: str, predictor: Any, packed: PackTiny) -> None:
    _, path = packed(arch, "Q8_0")
    with LLM(path) as llm:
        decoded = _decode(llm, TOKENS[:40])
    with LLM(path, cache=_floor(path), prefetch="on", predictor=predictor) as llm:
        assert torch.equal(_decode(llm, TOKENS[:40]), decoded)


def test_the_look_ahead_is_exact_where_layers_change_nothing(
    packed: PackTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would apply another norm or router than the layer it speaks of, and foresee little."""
    _, path = packed("qwen3moe", "Q8_0", num_hidden_layers=6)
    monkeypatch.setattr(
        "leanmoe.models.moe._weighted_sum", lambda outputs, _: torch.zeros_like(outputs[:, 0])
    )
    said: dict[int, Any] = {}
    picked: dict[int, list[int]] = {}
    with LLM(path, cache=2 * _floor(path), prefetch="on") as llm:
        pool: Any = llm._pool
        pool.expect = lambda layer, chances: said.update({layer: chances})
        pool.visit = lambda layer, phase, experts: picked.update({layer: experts})
        for layer in llm.decoder.layers:
            layer.mixer.out.data.zero_()
        _decode(llm, TOKENS[:1])
    assert sorted(said) == [1, 2, 3, 4, 5]
    for number, chances in said.items():
        likeliest = np.argsort(-chances, kind="stable")[: len(picked[number])]
        assert sorted(likeliest.tolist()) == sorted(picked[number])


def _decode(llm: LLM, tokens: list[int]) -> torch.Tensor:
    dtype = torch.float16
    state = llm.decoder.new_state(len(tokens), dtype)
    return torch.cat([llm.decoder.forward(Batch.of([(state, [t])])) for t in tokens])


@pytest.mark.parametrize("arch", ["qwen3moe", "mixtral", "qwen2"])
def test_two_sequences_together_give_the_logits_of_each_alone(arch: str, packed: PackTiny) -> None:
    """Serving batches the tokens of several users: one must not see another's."""
    _, path = packed(arch)
    first, second = TOKENS[:50], TOKENS[50:75]
    with LLM(path) as llm:

        def fresh() -> object:
            return llm.decoder.new_state(128, torch.float16)

        def alone(tokens: list[int]) -> torch.Tensor:
            state = fresh()
            prompt = llm.decoder.forward(Batch.of([(state, tokens[:-1])], all_logits=True))
            return torch.cat([prompt, llm.decoder.forward(Batch.of([(state, tokens[-1:])]))])

        a, b = fresh(), fresh()
        llm.decoder.forward(Batch.of([(a, first[:-1])]))
        # A decode token of one sequence beside a prefill chunk of the other.
        mixed = llm.decoder.forward(Batch.of([(a, first[-1:]), (b, second[:-1])], all_logits=True))
        last = llm.decoder.forward(Batch.of([(a, [1]), (b, second[-1:])]))
        want_a, want_b = alone(first), alone(second)
    torch.testing.assert_close(mixed[0], want_a[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed[1:], want_b[:-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last[1], want_b[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ["qwen3moe"])
def test_a_copied_sequence_goes_on_by_itself(arch: str, packed: PackTiny) -> None:
    """Two answers to one prompt would otherwise write into each other's memory."""
    _, path = packed(arch)
    with LLM(path) as llm:
        state = llm.decoder.new_state(64, torch.float16)
        llm.decoder.forward(Batch.of([(state, TOKENS[:20])]))
        other = state.copy()
        assert other.nbytes == state.nbytes
        want = llm.decoder.forward(Batch.of([(state, [TOKENS[20]])]))
        llm.decoder.forward(Batch.of([(state, [TOKENS[40]])]))
        assert torch.equal(llm.decoder.forward(Batch.of([(other, [TOKENS[20]])])), want)


@pytest.mark.parametrize("arch", MOE)
def test_layers_split_over_two_devices_give_the_same_bits(arch: str, packed: PackTiny) -> None:
    experts = {"num_local_experts": 8} if arch == "mixtral" else {}
    _, path = packed(arch, "Q8_0", **experts)
    with LLM(path) as llm:
        want = llm.logits(TOKENS)
    with LLM(path, devices=("cpu", "cpu"), cache=_floor(path, 2)) as llm:
        assert [len(d.layers) for d in llm.plan.devices] == [1, 1]
        assert torch.equal(llm.logits(TOKENS), want)
        assert llm.stats.evictions > 0


KERNEL_TYPES = [
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4",
]  # fmt: skip
DEQUANTISED_TYPES = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"]


@pytest.mark.slow
@pytest.mark.parametrize("quant", DEQUANTISED_TYPES)
def test_types_without_a_kernel_are_computed_exactly(quant: str, packed: PackTiny) -> None:
    """Their experts and trunk take a path of their own, which rounds nothing."""
    from oracles import hf

    tiny, path = packed("qwen3moe", quant, head_dim=64)  # every row a whole number of blocks
    want = hf.logits(tiny.hf_model, TOKENS)
    with LLM(path, kv_type="f32") as llm:
        got = llm.logits(TOKENS).numpy()
    assert np.abs(got - want).max() <= 1e-3 * want.std()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "quant"),
    [(arch, quant) for arch in ARCHITECTURES for quant in KERNEL_TYPES]
    + [("qwen2", quant) for quant in DEQUANTISED_TYPES],  # no router whose near-ties rounding could tip
)
def test_quantised_models_agree_with_llama_cpp(arch: str, quant: str, packed: PackTiny) -> None:
    """The same file must mean the same to lean and to llama.cpp, for every architecture and type."""
    from oracles.llama_cpp import LlamaCpp, kl_and_top1

    tiny, path = packed(arch, quant)
    tokens = Random(11).choices(range(280), k=600)
    with LlamaCpp(tiny.path, n_ctx=1024, flash_attention=True) as model:
        want = model.logits(tokens)
    with LlamaCpp(tiny.path, n_ctx=1024, flash_attention=False) as model:
        floor = kl_and_top1(want, model.logits(tokens))  # how well llama.cpp agrees with itself
    with LLM(path) as llm:
        got = llm.logits(tokens).numpy()
    agreement = kl_and_top1(want, got)
    assert agreement.mean_kl <= 2e-3
    assert agreement.top1 >= min(0.98, floor.top1 - 0.01)


_LONG = {"rope_theta": 10000.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("linear", {"factor": 4.0}),
        ("yarn", {"factor": 8.0}),
        ("yarn", {"factor": 32.0, "truncate": False}),
        ("yarn", {"factor": 32.0, "beta_fast": 8.0, "beta_slow": 2.0}),
        ("yarn", {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    ],
    ids=str,
)
def test_rope_with_linear_and_yarn_scaling_equals_transformers(kind: str, parameters: dict[str, Any]) -> None:
    """Long-context models would otherwise fall apart past their original context."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from leanmoe.models.architectures.common import read_rope
    from leanmoe.models.rope import Rope
    from leanmoe.models.spec import Metadata

    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": kind} | _LONG | parameters,
    )
    want, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    keys = {"type": kind, "factor": parameters["factor"], "original_context_length": 512}
    keys |= {f"yarn_{name}": value for name, value in parameters.items() if name.startswith("beta")}
    if "mscale" in parameters:
        keys["yarn_log_multiplier"] = 0.1 * parameters["mscale_all_dim"]
    meta = Metadata({f"x.rope.scaling.{k}": v for k, v in keys.items()} | {"x.context_length": 4096}, "x", "")
    rope = Rope(read_rope(meta, "neox", 64, whole_pairs=parameters.get("truncate", True)))
    cos, _ = rope.tables(torch.arange(100), torch.device("cpu"))
    angles = torch.arange(100, dtype=torch.float64)[:, None] * want.double()
    torch.testing.assert_close(cos[:, 0], (angles.cos() * magnitude).float(), rtol=1e-4, atol=1e-4)

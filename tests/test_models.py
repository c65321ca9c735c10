"""The network: equal to transformers and llama.cpp, and independent of what happens to be resident."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from leanmoe import LLM
from leanmoe.bench.make_model import make_model
from leanmoe.engine.sequence import Sequence, prefill
from leanmoe.errors import ExpertReadError
from leanmoe.experts.policy import POLICIES
from leanmoe.models.batch import Batch
from leanmoe.pack import pack_gguf
from oracles.rewrite import Tensors, rewritten
from tiny_packs import MOE, TOKENS, PackTiny, decode, floor_bytes

ARCHITECTURES = [*MOE, "llama", "qwen2", "qwen3"]
# Models that share an architecture with one above.
KIN = ["glm4moelite", "deepseekv2lite", "deepseekv2"]
LOCAL_PROMPT = "The harbour was quiet before six."


@pytest.mark.parametrize("arch", ARCHITECTURES + KIN)
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
        decoded = decode(llm, TOKENS[:40])
    assert torch.equal(resident, again)
    with LLM(path, cache=floor_bytes(path)) as llm:
        assert llm.plan.residency < 1.0
        streamed = llm.logits(TOKENS)
        streamed_decoded = decode(llm, TOKENS[:40])
        assert llm.stats.evictions > 0
    assert torch.equal(streamed, resident)
    assert torch.equal(streamed_decoded, decoded)


@pytest.mark.parametrize("prefetch", ["off", "auto", "on"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_and_no_prefetch_changes_a_bit(policy: str, prefetch: Any, packed: PackTiny) -> None:
    """What is kept and what is read ahead may change the time of an answer, never the answer."""
    _, path = packed("qwen3moe", "Q8_0", num_hidden_layers=6)
    with LLM(path) as llm:
        resident, decoded = llm.logits(TOKENS[:48]), decode(llm, TOKENS)
    with LLM(path, cache=2 * floor_bytes(path), policy=policy, prefetch=prefetch) as llm:
        assert llm.plan.residency < 1.0
        assert torch.equal(llm.logits(TOKENS[:48]), resident)
        assert torch.equal(decode(llm, TOKENS), decoded)
        assert llm.stats.evictions > 0
        assert (llm.stats.prefetch.issued > 0) == (prefetch != "off")


@pytest.fixture(scope="module")
def local_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that routes with the locality of real text."""
    path = tmp_path_factory.mktemp("local") / "local.lmpack"
    make_model("tiny", path, pack=True, locality=True)
    return path


@pytest.fixture(scope="module")
def local_logits(local_pack: Path) -> torch.Tensor:
    """Of it, fully resident, for each of the tokens that it says."""
    with LLM(local_pack, context=256) as llm:
        said = llm.generate(LOCAL_PROMPT, max_tokens=96, temperature=0, ignore_eos=True).tokens
        return decode(llm, said)


@pytest.mark.parametrize("prefetch", ["off", "auto", "on"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nor_where_routing_is_as_local_as_real_text(
    policy: str, prefetch: Any, local_pack: Path, local_logits: torch.Tensor
) -> None:
    """Here most look-ups hit, as a user's do, and guesses come true."""
    with LLM(local_pack, context=256, warm=0) as llm:
        expert_bytes = llm.plan.experts
    with LLM(
        local_pack, context=256, cache=expert_bytes * 30 // 100, policy=policy, prefetch=prefetch
    ) as llm:
        said = llm.generate(LOCAL_PROMPT, max_tokens=96, temperature=0, ignore_eos=True).tokens
        assert torch.equal(decode(llm, said), local_logits)
        assert llm.stats.hit_rate > 0.6
        assert llm.stats.evictions > 0
        assert (llm.stats.prefetch.issued > 0) == (prefetch != "off")


@pytest.mark.parametrize("arch", ["qwen3moe", "mixtral", "qwen2", "qwen35moe", "deepseek2"])
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


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_parts_of_a_long_pass_are_what_shorter_passes_would_be(
    arch: str, packed: PackTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt goes through attention part by part; each must find what those before it left, and no more."""
    _, path = packed(arch)
    with LLM(path, kv_type="f32", chunk=20) as llm:
        want = llm.logits(TOKENS)
    with LLM(path, kv_type="f32") as llm:
        monkeypatch.setattr("leanmoe.models.batch.PART", 20)
        assert torch.equal(llm.logits(TOKENS), want)
        one, other = (llm.decoder.new_state(96, torch.float32) for _ in range(2))
        both = llm.decoder.forward(Batch.of([(one, TOKENS[:33]), (other, TOKENS)], all_logits=True))
        torch.testing.assert_close(both[:33], want[:33], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(both[33:], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen3next", "deepseek2"])
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


def test_a_sequence_with_recurrent_layers_goes_back_to_its_checkpoint(packed: PackTiny) -> None:
    """Else a conversation would either be computed anew at each turn, or go on from what was never said."""
    _, path = packed("qwen35moe")
    with LLM(path, kv_type="f32") as llm:
        want = llm.logits(TOKENS)
        state = llm.decoder.new_state(len(TOKENS), torch.float32)

        def feed(tokens: list[int]) -> torch.Tensor:
            return llm.decoder.forward(Batch.of([(state, tokens)], all_logits=True))

        state.mark = 30
        feed(TOKENS[:50])
        assert state.truncate(50) == 50
        assert state.truncate(40) == 30
        torch.testing.assert_close(feed(TOKENS[30:]), want[30:], rtol=1e-3, atol=1e-3)
        assert state.truncate(30) == 30
        assert state.truncate(29) == 0
        torch.testing.assert_close(feed(TOKENS), want, rtol=1e-3, atol=1e-3)
        assert state.truncate(90) == 0  # that checkpoint was given up


@pytest.mark.parametrize(("arch", "kept"), [("qwen3moe", 75), ("qwen3next", 64)])
def test_a_prompt_that_ends_otherwise_is_computed_only_near_its_end(
    arch: str, kept: int, packed: PackTiny
) -> None:
    """A chat template opens the answer with tokens that are not there once the answer has become history."""
    _, path = packed(arch)
    with LLM(path, kv_type="f32") as llm:
        sequence = Sequence(llm.decoder.new_state(len(TOKENS), torch.float32))
        prefill(llm.decoder, sequence, TOKENS[:80], 32)
        other = TOKENS[:75] + TOKENS[81:]
        assert sequence.keep_prefix(other) == kept
        got = prefill(llm.decoder, sequence, other[kept:], 32)
        torch.testing.assert_close(got, llm.logits(other)[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("arch", "mark", "kept"), [("qwen3moe", None, 60), ("qwen35moe", None, 20), ("qwen35moe", 65, 0)]
)
@pytest.mark.parametrize("after", [0, 2])
def test_a_sequence_goes_on_after_an_expert_could_not_be_read(
    arch: str, mark: int | None, kept: int, after: int, packed: PackTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have seen the tokens of the failed pass, or saved over their checkpoints; the others have not."""
    _, path = packed(arch, num_hidden_layers=4)
    with LLM(path, kv_type="f32") as llm:
        want = llm.logits(TOKENS)
        sequence = Sequence(llm.decoder.new_state(len(TOKENS), torch.float32))
        state = sequence.state
        state.mark = 20
        llm.decoder.forward(Batch.of([(state, TOKENS[:60])]))
        sequence.tokens = TOKENS[:60]
        state.mark = mark

        def fail(*_: object) -> None:
            raise ExpertReadError("gone")

        with monkeypatch.context() as patch:
            patch.setattr(llm.decoder.layers[after], "ffn", fail)
            with pytest.raises(ExpertReadError):
                llm.decoder.forward(Batch.of([(state, TOKENS[60:70])]))
        assert state.length == kept
        assert sequence.keep_prefix(TOKENS) == kept
        got = llm.decoder.forward(Batch.of([(state, TOKENS[kept:])]))[0]
        torch.testing.assert_close(got, want[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("arch", "kept"), [("qwen3moe", 64), ("qwen35moe", 0), ("deepseek2", 64)])
@pytest.mark.parametrize("layers", [5, 6, 7])
def test_a_prompt_can_be_stopped_between_two_layers(
    arch: str, kept: int, layers: int, packed: PackTiny
) -> None:
    """A chunk of a large model takes half a minute; who stops it waits for a layer, and what was done is not lost."""
    _, path = packed(arch, num_hidden_layers=4)
    with LLM(path, kv_type="f32") as llm:
        sequence = Sequence(llm.decoder.new_state(len(TOKENS), torch.float32))
        asked = 0

        def stop() -> bool:  # within the second chunk; each is asked for once before its four layers
            nonlocal asked
            asked += 1
            return asked > layers + 2

        assert prefill(llm.decoder, sequence, TOKENS, 64, stop) is None
        assert len(sequence.tokens) == sequence.state.length == kept
        rest = TOKENS[sequence.keep_prefix(TOKENS) :]
        got = prefill(llm.decoder, sequence, rest, 64)
        assert got is not None
        torch.testing.assert_close(got, llm.logits(TOKENS)[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_plan_counts_what_a_sequence_keeps(arch: str, packed: PackTiny) -> None:
    """State that is not planned is taken from the rest of the machine."""
    _, path = packed(arch)
    with LLM(path, context=200) as llm:
        assert llm.decoder.new_state(200, torch.float16).nbytes == sum(d.state for d in llm.plan.devices)


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe", "deepseek2"])
def test_the_number_of_threads_changes_no_bit(arch: str, packed: PackTiny) -> None:
    _, path = packed(arch)
    tokens = Random(3).choices(range(280), k=500)
    with LLM(path, threads=1, chunk=512) as llm:
        want = llm.logits(tokens)
    with LLM(path, threads=3, chunk=512) as llm:
        assert torch.equal(llm.logits(tokens), want)


def test_old_files_of_qwen3next_with_one_projection_are_the_same_model(
    packed: PackTiny, tmp_path: Path
) -> None:
    """The files of its first months hold queries, keys, values and gates in one tensor, key head by key head."""
    tiny, path = packed("qwen3next")

    def fuse(tensors: Tensors) -> None:
        for layer in (0, 1, 2):
            (qkv, kind), (z, _) = (tensors.pop(f"blk.{layer}.attn_{n}.weight") for n in ("qkv", "gate"))
            q, k, v, z = (m.reshape(2, -1, m.shape[-1]) for m in (*np.split(qkv, [32, 64]), z))
            fused = np.concatenate([q, k, v, z], axis=1).reshape(-1, qkv.shape[-1])
            tensors[f"blk.{layer}.ssm_in.weight"] = fused, kind

    old = rewritten(tiny.path, tmp_path / "old.gguf", {}, fuse)
    with LLM(path) as llm:
        want = llm.logits(TOKENS)
    with LLM(pack_gguf(old, tmp_path / "old.lmpack")) as llm:
        torch.testing.assert_close(llm.logits(TOKENS), want, rtol=1e-4, atol=1e-4)


def test_blocks_for_multi_token_prediction_are_left_out(packed: PackTiny, tmp_path: Path) -> None:
    """Run as one more layer, such a block would spoil every answer."""
    tiny, path = packed("qwen35moe")

    def add(tensors: Tensors) -> None:
        block = {n: t for n, t in tensors.items() if n.startswith("blk.3.")}
        tensors.update({n.replace("blk.3.", "blk.4."): t for n, t in block.items()})
        tensors["blk.4.nextn.eh_proj.weight"] = tensors["blk.3.attn_q.weight"]

    keys = {"block_count": 5, "nextn_predict_layers": 1}
    longer = rewritten(tiny.path, tmp_path / "mtp.gguf", keys, add)
    with LLM(path) as llm:
        want = llm.logits(TOKENS)
    with LLM(pack_gguf(longer, tmp_path / "mtp.lmpack")) as llm:
        assert llm.spec.layers == 4
        assert torch.equal(llm.logits(TOKENS), want)


@pytest.mark.parametrize("arch", MOE)
def test_layers_split_over_two_devices_give_the_same_bits(arch: str, packed: PackTiny) -> None:
    experts = {"num_local_experts": 8} if arch == "mixtral" else {}
    _, path = packed(arch, "Q8_0", **experts)
    with LLM(path) as llm:
        want = llm.logits(TOKENS)
    with LLM(path, devices=("cpu", "cpu"), cache=floor_bytes(path, 2)) as llm:
        assert all(d.layers for d in llm.plan.devices)
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
def test_quantised_models_agree_with_llama_cpp(arch: str, quant: str, tmp_path: Path) -> None:
    """The same file must mean the same to lean and to llama.cpp, for every architecture and type."""
    from oracles.llama_cpp import LlamaCpp, kl_and_top1
    from oracles.tiny import tiny_gguf
    from oracles.tiny_families import gpt_oss_rope

    # llama.cpp does not do without the rounding that the model was trained without.
    llama_cpp = {"gpt-oss": {"rope_parameters": gpt_oss_rope(whole_pairs=True)}}
    tiny = tiny_gguf(tmp_path / "tiny.gguf", arch, quant, **llama_cpp.get(arch, {}))
    path = pack_gguf(tiny.path, tmp_path / "tiny.lmpack")
    tokens = Random(11).choices(range(280), k=600)
    with LlamaCpp(tiny.path, n_ctx=1024, flash_attention=True) as model:
        want = model.logits(tokens)
    with LlamaCpp(tiny.path, n_ctx=1024, flash_attention=False) as model:
        floor = kl_and_top1(want, model.logits(tokens))  # how well llama.cpp agrees with itself
    with LLM(path) as llm:
        got = llm.logits(tokens).numpy()
    agreement = kl_and_top1(want, got)
    assert agreement.mean_kl <= max(2e-3, 1.25 * floor.mean_kl)
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


@pytest.mark.parametrize("arch", ["qwen3moe", "granitemoe", "gemma4"])
def test_more_sequences_than_go_together_decode_as_each_alone(
    arch: str, packed: PackTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large batch would be answered without its experts."""
    _, path = packed(arch, "Q8_0")
    monkeypatch.setattr("leanmoe.models.batch.PART", 20)
    tokens = TOKENS[:29]
    with LLM(path) as llm:
        states = [llm.decoder.new_state(1, torch.float16) for _ in tokens]
        together = llm.decoder.forward(Batch.of([(s, [t]) for s, t in zip(states, tokens, strict=True)]))
        for row in (0, 19, 20, 28):
            alone = llm.decoder.forward(Batch.of([(llm.decoder.new_state(1, torch.float16), [tokens[row]])]))
            assert torch.equal(together[row], alone[0])

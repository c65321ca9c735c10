"""The oracles agree with each other, so that a difference from lean is a fault of lean."""

import importlib
import random
from pathlib import Path

import numpy as np
import pytest

TOKENS = random.Random(5).choices(range(280), k=96)
ARCHITECTURES = [
    "qwen3moe",
    "qwen2moe",
    "olmoe",
    "mixtral",
    "qwen3next",
    "qwen35moe",
    "glm4moe",
    "minimax-m2",
    "deepseek2",
    "llama",
    "qwen2",
    "qwen3",
]
QUANTS = [
    "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0",
]  # fmt: skip
SLOW_QUANTS = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"]


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "glm4moelite", "deepseekv2lite"])
def test_a_tiny_f32_file_means_the_same_to_llama_cpp_and_to_transformers(arch: str, tmp_path: Path) -> None:
    """A wrong name, permutation or key in the test files would make every parity test of lean worthless."""
    from oracles import hf
    from oracles.llama_cpp import LlamaCpp
    from oracles.tiny import tiny_gguf

    tiny = tiny_gguf(tmp_path / "tiny.gguf", arch)
    want = hf.logits(tiny.hf_model, TOKENS)
    with LlamaCpp(tiny.path, n_ctx=256, kv="f32", flash_attention=False) as model:
        got = model.logits(TOKENS)
    assert 1.0 < want.std() < 4.0
    assert np.abs(got - want).max() <= 1e-3 * want.std()


@pytest.mark.parametrize(
    "quant", [*QUANTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_QUANTS)]
)
def test_llama_cpp_loads_each_quantised_tiny_model_as_the_weights_it_was_made_from(
    quant: str, tmp_path: Path
) -> None:
    """A type whose blocks the tests write wrongly could never show that lean reads them rightly."""
    from oracles import hf
    from oracles.llama_cpp import kl_and_top1, logprobs
    from oracles.tiny import tiny_gguf

    tiny = tiny_gguf(tmp_path / "tiny.gguf", "qwen3moe", quant)
    agreement = kl_and_top1(hf.logits(tiny.hf_model, TOKENS), logprobs(tiny.path, TOKENS))
    assert agreement.mean_kl < 5e-3
    assert agreement.top1 > 0.9


def test_quantising_a_width_that_is_not_whole_blocks_falls_back_as_llama_quantize_does(
    tmp_path: Path,
) -> None:
    """Real Q4_K_M files mix types in one expert; without such a file nothing would test that."""
    import gguf

    from oracles.llama_cpp import LlamaCpp
    from oracles.tiny import tiny_gguf

    tiny = tiny_gguf(tmp_path / "tiny.gguf", "qwen3moe", "Q4_K", moe_intermediate_size=288)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tiny.path).tensors}
    assert kinds["blk.0.ffn_gate_exps.weight"] == "Q4_K"
    assert kinds["blk.0.ffn_down_exps.weight"] == "Q5_0"
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    with LlamaCpp(tiny.path, n_ctx=64) as model:
        assert np.isfinite(model.logits(TOKENS[:8])).all()


def test_the_c_interface_gives_what_the_wheels_own_server_gives(tmp_path: Path) -> None:
    """The structures are declared by hand: a wrong offset would measure some other setting of llama.cpp."""
    xllamacpp = importlib.import_module("xllamacpp")

    from oracles.llama_cpp import logprobs
    from oracles.tiny import tiny_gguf

    tiny = tiny_gguf(tmp_path / "tiny.gguf", "qwen3moe", "Q4_K")
    params = xllamacpp.CommonParams()
    params.model.path = str(tiny.path)
    params.n_ctx, params.n_gpu_layers, params.n_parallel, params.warmup = 256, 0, 1, False
    params.cpuparams.n_threads = 2
    server = xllamacpp.Server(params)
    # It has no word on a token that begins a character of several bytes: such prompts are passed over.
    prompts = (TOKENS[:n] for n in range(len(TOKENS), 0, -1))
    request = {"max_tokens": 1, "logprobs": tiny.vocab_size, "temperature": 0.0, "cache_prompt": False}
    answers = ((p, server.handle_completions({"prompt": p, **request})["choices"][0]) for p in prompts)
    prompt, choice = next((p, choice) for p, choice in answers if choice["logprobs"])
    top = choice["logprobs"]["content"][0]["top_logprobs"]
    got = np.full(tiny.vocab_size, np.nan)
    for entry in top:
        got[entry["id"]] = entry["logprob"]
    want = logprobs(tiny.path, prompt, [len(prompt) - 1])[0]
    assert len(top) == tiny.vocab_size
    np.testing.assert_allclose(got, want, atol=1e-3)


def test_the_tiny_tokenizer_is_whole(tmp_path: Path) -> None:
    """A merge of pieces that are not tokens is refused by some readers and ignored by others."""
    from oracles.llama_cpp import LlamaCpp
    from oracles.tiny import tiny_gguf

    text = "The thing and the rest: naïve 東京 🙂\n\tx += 1"
    with LlamaCpp(tiny_gguf(tmp_path / "tiny.gguf", "qwen2").path, n_ctx=64) as model:
        ids = model.tokenize(text)
        assert model.text(ids) == text
        assert len(ids) < len(text.encode())
        assert len(model.tokenize("<|im_start|>")) == 1


@pytest.mark.parametrize("arch", ["qwen2moe", "mixtral"])
def test_the_f32_copy_of_a_quantised_file_is_the_same_model_exactly(arch: str, tmp_path: Path) -> None:
    """The tight gates compare with this copy; if it lost anything they would blame lean."""
    from oracles import hf
    from oracles.llama_cpp import LlamaCpp
    from oracles.tiny import tiny_gguf
    from oracles.unquantise import f32_copy

    tiny = tiny_gguf(tmp_path / "tiny.gguf", arch, "Q4_K")
    want = hf.logits(tiny.hf_model, TOKENS)
    copy = f32_copy(tiny.path, tmp_path / "f32.gguf")
    with LlamaCpp(copy, n_ctx=256, kv="f32", flash_attention=False) as model:
        got = model.logits(TOKENS)
    assert np.abs(got - want).max() <= 1e-3 * want.std()

"""Real models on real text: lean's probabilities are llama.cpp's, on the same file.

Both round activations to 8 bits, and a difference in the last bit of a sum can tip a rounding, which the layers
after it amplify. So on a quantised real model llama.cpp does not agree with itself to better than some thousandths
of a nat when flash attention is switched on or off. The tests hold lean to that floor, measured in the same run,
and, where nothing is rounded, to equality.
"""

from pathlib import Path

import pytest

from leanmoe import LLM
from leanmoe.pack import pack_gguf
from oracles.llama_cpp import LlamaCpp, kl_and_top1

CONTEXT = 1024


def _lean(gguf: Path, tmp_path: Path, text: str, kv: str) -> tuple[list[int], "object"]:
    with LLM(pack_gguf(gguf, tmp_path / f"{gguf.stem}.lmpack"), context=CONTEXT, kv_type=kv) as llm:
        tokens = llm.tokenizer.encode(text)[:700]
        assert len(tokens) >= 500
        return tokens, llm.logits(tokens).numpy()


@pytest.mark.slow
def test_unrounded_probabilities_on_real_text_equal_those_of_llama_cpp(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    """A wrong formula anywhere, however small its effect, would show here."""
    from model_fixtures import real_text
    from oracles.unquantise import f32_copy

    gguf = f32_copy(smollm2_gguf, tmp_path / "f32.gguf")
    tokens, got = _lean(gguf, tmp_path, real_text(), "f32")
    with LlamaCpp(gguf, n_ctx=CONTEXT, kv="f32", flash_attention=False) as model:
        want = model.logits(tokens)
    agreement = kl_and_top1(want, got)
    assert agreement.mean_kl <= 1e-8
    assert agreement.top1 == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2_gguf", "demo_gguf"])
def test_probabilities_on_real_text_are_as_near_to_llama_cpp_as_it_is_to_itself(
    model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A user who moves a GGUF from llama.cpp to lean must not get another model."""
    from model_fixtures import real_text

    gguf: Path = request.getfixturevalue(model)
    tokens, got = _lean(gguf, tmp_path, real_text(), "f16")
    with LlamaCpp(gguf, n_ctx=CONTEXT, flash_attention=True) as reference:
        assert reference.tokenize(real_text())[:700] == tokens
        want = reference.logits(tokens)
    with LlamaCpp(gguf, n_ctx=CONTEXT, flash_attention=False) as other:
        floor = kl_and_top1(want, other.logits(tokens))
    agreement = kl_and_top1(want, got)
    print(f"{model}: lean {agreement}, llama.cpp with itself {floor}")
    assert agreement.mean_kl <= max(2e-3, 1.25 * floor.mean_kl)
    assert agreement.top1 >= min(0.98, floor.top1 - 0.015)

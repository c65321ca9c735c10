"""A prompt's last layer is computed for the tokens whose logits are wanted, and nothing else changes by it."""

import pytest
import torch

from leanmoe import LLM
from leanmoe.models.batch import Batch
from leanmoe.models.spec import PART
from tiny_packs import MOE, TOKENS, PackTiny

CHUNK = 2 * PART + 9
PROMPT = (TOKENS * 40)[: CHUNK + 31]


def answer(llm: LLM) -> list[torch.Tensor]:
    """Logits after each chunk of a prompt, and after two tokens more."""
    steps = [PROMPT[:CHUNK], PROMPT[CHUNK:], TOKENS[:1], TOKENS[1:2]]
    with llm.sequence() as sequence:
        return [llm.decoder.forward(Batch.of([(sequence.state, tokens)])) for tokens in steps]


def lookups_of(llm: LLM) -> dict[int, int]:
    return {layer: stats.lookups for layer, stats in llm.stats.layers.items()}


@pytest.mark.parametrize("arch", MOE)
def test_no_bit_depends_on_the_tokens_left_out(arch: str, packed: PackTiny) -> None:
    """What they leave behind for later tokens is all that anybody sees of them."""
    _, path = packed(arch, "Q8_0")
    with LLM(path, context=512) as llm:
        cut, lookups = answer(llm), lookups_of(llm)
    with LLM(path, context=512, recording=1 << 20) as llm:
        whole, all_lookups = answer(llm), lookups_of(llm)
        rows = llm.trace().rows
        after_each = llm.logits(PROMPT)
    for mine, theirs in zip(cut, whole, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(cut[1][0], after_each[-1])
    layers = sorted(lookups)
    assert all(lookups[i] == all_lookups[i] for i in layers[:-1])
    last = layers[-1]
    assert lookups[last] == 4 * llm.spec.router.top_k < all_lookups[last]
    assert all((rows["layer"] == i).sum() == len(PROMPT) + 2 for i in layers)


def test_of_several_sequences_none_is_cut_short(packed: PackTiny) -> None:
    """Who watches the routing could not tell whose tokens are left."""
    _, path = packed("qwen3moe", "Q8_0")
    with LLM(path, context=64) as llm:
        alone = [llm.logits(tokens)[-1] for tokens in (TOKENS[:9], TOKENS[3:20])]
        states = [llm.decoder.new_state(64, torch.float16) for _ in alone]
        batch = Batch.of([(states[0], TOKENS[:9]), (states[1], TOKENS[3:20])])
        last = max(before := lookups_of(llm))
        assert torch.equal(llm.decoder.forward(batch), torch.stack(alone))
        assert lookups_of(llm)[last] - before[last] > 2 * llm.spec.router.top_k

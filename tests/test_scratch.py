"""What a prompt's pass takes, beside what the plan says it may."""

from collections.abc import Sequence

import pytest
import torch

from leanmoe import LLM, kernels
from leanmoe.engine.plan import scratch_bytes
from leanmoe.kernels import tape, workspace
from leanmoe.models import decoder
from tiny_packs import MOE, TOKENS, PackTiny


@pytest.mark.parametrize("arch", MOE)
def test_a_prompt_takes_no_more_than_is_planned(
    arch: str, packed: PackTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget is filled with slots up to that; with more, the kernel would end the process."""
    _, path = packed(arch, "Q8_0")
    take, most = workspace.Workspace.take, 0

    def counted(
        self: workspace.Workspace, shape: Sequence[int], dtype: torch.dtype, nbytes: int
    ) -> torch.Tensor:
        nonlocal most
        taken = take(self, shape, dtype, nbytes)
        most = max(most, workspace._REGION_BYTES - sum(end - begin for begin, end in self._free))
        return taken

    monkeypatch.setattr(workspace.Workspace, "take", counted)
    monkeypatch.setattr(tape, "LARGE", 1 << 12)  # of so small a model, all that is not smaller than a page
    tokens = (TOKENS * 40)[:1000]
    with LLM(path, context=1024, chunk=len(tokens)) as llm:
        kernels.release_scratch()
        llm.generate(tokens, max_tokens=1)
        planned = scratch_bytes(llm.spec, len(tokens), 1024, kernels.get_num_threads())
    assert len(tokens) * 4 * llm.spec.hidden < most
    assert most + kernels.scratch_bytes() < planned


def test_what_a_prompts_layers_freed_is_given_back(packed: PackTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each of them; a decode step, which needs the same little blocks again and again, keeps them."""
    _, path = packed("qwen3moe", "Q8_0")
    times = list[None]()
    monkeypatch.setattr(decoder, "give_back_freed", lambda: times.append(None))
    with LLM(path, context=1024) as llm:
        llm.generate((TOKENS * 40)[:1000], max_tokens=4)
        assert len(times) == llm.spec.layers

"""The memory plan: nothing that grows with a setting may be left out of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from leanmoe.engine.config import EngineConfig
from leanmoe.engine.plan import plan_memory, scratch_bytes
from leanmoe.errors import BudgetError, UsageError
from leanmoe.formats.gguf import read_gguf
from leanmoe.models.registry import model_spec
from leanmoe.pack import expert_layouts, pack_gguf

LEAN = [sys.executable, "-m", "leanmoe"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from oracles.tiny import tiny_gguf

    heads = dict(num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=16384)
    return tiny_gguf(tmp_path_factory.mktemp("plan") / "tiny.gguf", "qwen3moe", "Q8_0", **heads).path


def test_what_attention_needs_at_once_does_not_grow_with_chunk_times_context(gguf: Path) -> None:
    """On a machine with many cores a long prompt once ended in the out-of-memory killer."""
    spec = model_spec(read_gguf(gguf))
    grown = scratch_bytes(spec, 512, 16384, 64) - scratch_bytes(spec, 512, 512, 64)
    # A single token's heads each leave one sum for every span of keys, whatever the chunk and the threads.
    assert grown == scratch_bytes(spec, 64, 16384, 8) - scratch_bytes(spec, 64, 512, 8)
    assert 0 <= grown < 2 * (16384 - 512)
    assert scratch_bytes(spec, 512, 16384, 64) < 128 << 20


def test_the_smallest_memory_named_by_a_refusal_survives_a_process_slightly_larger(gguf: Path) -> None:
    """No two processes start with exactly the same memory; the number must hold for the next one."""
    model = read_gguf(gguf)
    spec, manifest, base = model_spec(model), expert_layouts(model), 250 << 20
    with pytest.raises(BudgetError) as refused:
        plan_memory(spec, model, manifest, EngineConfig(context=256), memory=base, base=base)
    named = int(str(refused.value).partition("the smallest that works is ")[2].partition("MiB")[0]) << 20
    plan_memory(spec, model, manifest, EngineConfig(context=256), memory=named, base=base + (3 << 20))


def test_the_smallest_memory_of_a_plan_is_that_of_a_refusal_and_is_accepted(gguf: Path) -> None:
    """The plan's footer was rounded down, and then refused."""
    model = read_gguf(gguf)
    spec, manifest, base = model_spec(model), expert_layouts(model), (250 << 20) + 12345
    config = EngineConfig(context=256)
    named = plan_memory(spec, model, manifest, config, memory=4 << 30, base=base).smallest_memory
    assert named % (1 << 20) == 0
    with pytest.raises(BudgetError, match=f"the smallest that works is {named >> 20}MiB "):
        plan_memory(spec, model, manifest, config, memory=base, base=base)
    assert plan_memory(spec, model, manifest, config, memory=named, base=base).smallest_memory == named


def test_a_cache_larger_than_the_budget_is_refused() -> None:
    """The slots are part of the budget: the number would be ignored in silence."""
    with pytest.raises(UsageError, match=r"2.0 GiB does not fit .* 1.0 GiB"):
        EngineConfig(cache=2 << 30, memory=1 << 30)


def test_prompts_are_read_in_large_chunks_where_the_cache_is_what_is_small(gguf: Path) -> None:
    """With memory to spare and a small `--cache`, experts were read twice as often as the plan meant them to be."""
    model = read_gguf(gguf)
    spec, manifest = model_spec(model), expert_layouts(model)
    experts = sum(m.expert_count * m.layout.file_bytes for m in manifest.layers)
    for cache, chunk, fits in ((None, 2048, True), (experts, 2048, True), (experts - 1, 4096, False)):
        config = EngineConfig(context=4096, cache=cache)
        made = plan_memory(spec, model, manifest, config, memory=8 << 30, base=250 << 20)
        assert (made.chunk, made.residency == 1) == (chunk, fits)


@pytest.mark.slow
def test_many_threads_and_a_long_prompt_stay_within_the_floor_that_plan_names(
    gguf: Path, tmp_path: Path
) -> None:
    pack = pack_gguf(gguf, tmp_path / "tiny.lmpack")
    prompt = tmp_path / "prompt"
    prompt.write_text("e" * 8000)
    common = ["--context", "8192", "--threads", "16", "--kv-type", "f32", "--chunk", "512", "--json"]
    floor = json.loads(_lean(["plan", str(pack), *common]))["floor"]
    run = ["run", str(pack), "--raw", "-f", str(prompt), "-n", "2", "--memory", str(floor), *common]
    assert json.loads(_lean(run))["memory_peak"] <= floor


def _lean(arguments: list[str]) -> str:
    done = subprocess.run([*LEAN, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout

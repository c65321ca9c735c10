"""lean runs Mixture-of-Experts language models that are larger than memory.

from leanmoe import LLM
with LLM("model.lmpack", memory="4GiB") as llm:
    print(llm.generate("The capital of France is", max_tokens=20).text)
"""

from typing import TYPE_CHECKING, Any

from leanmoe.errors import (
    BudgetError,
    ExpertReadError,
    FormatError,
    LeanError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:
    from leanmoe.engine.answer import Completion, Stream, Usage
    from leanmoe.engine.llm import LLM
    from leanmoe.engine.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BudgetError",
    "Completion",
    "ExpertReadError",
    "FormatError",
    "LeanError",
    "SamplingParams",
    "Stream",
    "UnsupportedError",
    "Usage",
    "UsageError",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the engine brings torch, which `lean pack` and `lean info` can do without.
    if name in __all__:
        from leanmoe.engine import answer, llm, sampling

        return next(getattr(module, name) for module in (llm, answer, sampling) if hasattr(module, name))
    raise AttributeError(f"module 'leanmoe' has no attribute {name!r}")

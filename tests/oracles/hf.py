"""transformers as an oracle: the architectures' own mathematics, float32, one eager operation at a time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def logits(model: "PreTrainedModel", tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Teacher-forced logits `[T, n_vocab]` for one sequence, without a cache."""
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    rows: npt.NDArray[np.float32] = out.float().numpy()
    return rows


def layer_outputs(model: "PreTrainedModel", tokens: Sequence[int]) -> list[npt.NDArray[np.float32]]:
    """The residual stream `[T, hidden]` before the first layer and after each; the last one is normalised."""
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True)
    return [state[0].float().numpy() for state in out.hidden_states]

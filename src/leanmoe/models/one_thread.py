"""torch's operations on one thread.

torch's own threads stay off on the CPU: between products they would spin against those of the kernels, and on a
busy machine one small operation could wait milliseconds for its slowest thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """torch's operations run on the calling thread alone; afterwards torch is as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

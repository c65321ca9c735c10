"""Small packs with random expert bytes, for the tests of `leanmoe.experts`, and a store whose reads can be held."""

import random
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from blake3 import blake3

from leanmoe.experts.policy import Key
from leanmoe.experts.store import ExpertStore
from leanmoe.formats.quant_types import quant_type
from leanmoe.pack.digests import DIGESTS, MANIFEST, TRUNK, expert_name, format_digests
from leanmoe.pack.layout import ExpertLayout, Section
from leanmoe.pack.manifest import LayerManifest, Manifest
from leanmoe.pack.reader import Pack, open_pack

_F32 = quant_type("F32")
_SECTIONS = {
    "gate": Section(_F32, (1, 16), 0, 64),
    "up": Section(_F32, (1, 16), 64, 64),
    "down": Section(_F32, (16, 1), 128, 64),
}


def make_pack(path: Path, sizes: Mapping[int, int], experts: int, top_k: int) -> Pack:
    """A pack in `path` whose layers have experts of `sizes` bytes, each file with its own random bytes."""
    path.mkdir(parents=True)
    layers, digests, source = [], {}, random.Random(7)
    for layer, size in sizes.items():
        layers.append(LayerManifest(layer, experts, ExpertLayout(_SECTIONS, size)))
        (path / expert_name(layer, 0)).parent.mkdir(parents=True)
        for expert in range(experts):
            data = source.randbytes(size)
            (path / expert_name(layer, expert)).write_bytes(data)
            digests[expert_name(layer, expert)] = blake3(data).digest()
    trunk = gguf.GGUFWriter(path / TRUNK, "test")
    trunk.add_tensor("output_norm.weight", np.zeros(16, np.float32))
    trunk.write_header_to_file()
    trunk.write_kv_data_to_file()
    trunk.write_tensors_to_file()
    trunk.close()
    trunk_bytes = (path / TRUNK).read_bytes()
    manifest = Manifest("test", experts, top_k, tuple(layers), (), len(trunk_bytes)).to_json()
    (path / MANIFEST).write_bytes(manifest)
    digests |= {MANIFEST: blake3(manifest).digest(), TRUNK: blake3(trunk_bytes).digest()}
    (path / DIGESTS).write_bytes(format_digests(digests))
    return open_pack(path)


def contents(pack: Pack) -> dict[Key, bytes]:
    """The bytes of every expert file, as they are now."""
    return {
        (m.layer, expert): pack.expert_path(m.layer, expert).read_bytes()
        for m in pack.manifest.layers
        for expert in range(m.expert_count)
    }


class GatedStore(ExpertStore):
    """A store whose reads of chosen experts wait until the test opens them. `order`: all reads as they began."""

    def __init__(self, pack: Pack) -> None:
        super().__init__(pack)
        self.gates: dict[Key, threading.Event] = {}
        self.began: dict[Key, threading.Event] = {}
        self.order: list[Key] = []

    @property
    def reads(self) -> Counter[Key]:
        """How often each expert was read."""
        return Counter(self.order)

    def hold(self, *keys: Key) -> None:
        """From now on reads of `keys` set their `began`, and wait."""
        self.gates |= {key: threading.Event() for key in keys}
        self.began |= {key: threading.Event() for key in keys}

    def open(self, *keys: Key) -> None:
        """Lets reads of `keys` go on; all that are held if none is named."""
        for key in keys or self.gates:
            self.gates[key].set()

    def read_into(self, key: Key, buffer: memoryview, *arrangement: Any) -> None:
        self.order.append(key)
        if key in self.gates:
            self.began[key].set()
            assert self.gates[key].wait(20)
        super().read_into(key, buffer, *arrangement)

    def of(self, layer: int) -> list[int]:
        """The experts of `layer` that were read, each as often as it was."""
        return sorted(expert for at, expert in self.order if at == layer)

"""Small packs with random expert bytes, for the tests of `leanmoe.experts`."""

import random
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from blake3 import blake3

from leanmoe.experts.policy import Key
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

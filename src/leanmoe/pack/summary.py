"""The facts about a pack or a bare GGUF model that `lean info` shows; reads headers only."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from leanmoe.formats.gguf import read_gguf
from leanmoe.formats.quant_types import QuantType
from leanmoe.pack.plan import expert_layouts
from leanmoe.pack.reader import names_pack, open_pack
from leanmoe.pack.slices import split_experts


@dataclass(frozen=True, slots=True)
class Summary:
    """Facts about a model. Sizes in bytes; `expert_bytes_min` and `_max` are of one expert, 0 if dense.

    `types` maps a tensor type to (number of tensors, bytes); a layer's stacked experts count as one tensor.
    For a bare GGUF the sizes are those its pack would have.
    """

    path: str
    packed: bool
    name: str | None
    architecture: str
    parameters: int
    layers: int
    expert_layers: int
    experts: int
    top_k: int
    expert_files: int
    expert_bytes: int
    expert_bytes_min: int
    expert_bytes_max: int
    trunk_bytes: int
    context_length: int | None
    chat_template: bool
    skipped_tensors: int
    types: dict[str, tuple[int, int]]


def summarize(path: Path) -> Summary:
    """The facts about the pack or GGUF file `path`. Raises as `open_pack` and `expert_layouts`."""
    packed = names_pack(path)
    if packed:
        pack = open_pack(path)
        gguf, manifest, trunk = pack.trunk, pack.manifest, tuple(pack.trunk.tensors.values())
    else:
        gguf = read_gguf(path)
        manifest, trunk = expert_layouts(gguf), split_experts(gguf).trunk

    def tensors() -> Iterator[tuple[QuantType, int, int]]:
        for tensor in trunk:
            yield tensor.qtype, math.prod(tensor.ne), tensor.nbytes
        for layer in manifest.layers:
            for section in layer.layout.sections.values():
                count = layer.expert_count
                yield section.qtype, math.prod(section.shape) * count, section.nbytes * count

    types: dict[str, tuple[int, int]] = {}
    for qtype, _, nbytes in tensors():
        count, before = types.get(qtype.name, (0, 0))
        types[qtype.name] = (count + 1, before + nbytes)
    sizes = [layer.layout.file_bytes for layer in manifest.layers]
    arch, name = manifest.architecture, gguf.metadata.get("general.name")
    context = gguf.metadata.get(f"{arch}.context_length")
    skipped_layers = gguf.integer(f"{arch}.nextn_predict_layers", 0)
    return Summary(
        path=str(path),
        packed=packed,
        name=name if isinstance(name, str) else None,
        architecture=arch,
        parameters=sum(elements for _, elements, _ in tensors()),
        layers=gguf.integer(f"{arch}.block_count") - skipped_layers,
        expert_layers=len(manifest.layers),
        experts=manifest.expert_count,
        top_k=manifest.expert_used_count,
        expert_files=manifest.expert_files,
        expert_bytes=manifest.expert_bytes,
        expert_bytes_min=min(sizes, default=0),
        expert_bytes_max=max(sizes, default=0),
        trunk_bytes=manifest.trunk_bytes,
        context_length=context if isinstance(context, int) else None,
        chat_template="tokenizer.chat_template" in gguf.metadata,
        skipped_tensors=len(manifest.skipped),
        types=dict(sorted(types.items(), key=lambda item: -item[1][1])),
    )

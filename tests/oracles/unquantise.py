"""The same model with its blocks written out as floats: llama.cpp then rounds no activation to 8 bits.

Between two runs of llama.cpp itself on one quantised file (flash attention on and off), rounding alone costs
SmolLM2 a mean KL of 3.5e-3. Against a float32 copy the same weights can be compared thousands of times closer.
"""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from oracles.quantise import dequantise, quantise, storage_type


def f32_copy(source: Path, out: Path) -> Path:
    """Write `out`: all metadata of `source`, every tensor dequantised to F32. One tensor in memory at a time."""
    return _copy(source, out, lambda tensor: "F32")


def requantised_copy(source: Path, out: Path, name: str) -> Path:
    """Write `out`: all metadata of `source`, and every matrix that is quantised there as type `name`."""
    kept = ("F32", "F16", "BF16")

    def kind(tensor: gguf.ReaderTensor) -> str:
        mine = tensor.tensor_type.name
        return mine if mine in kept else storage_type(name, int(tensor.shape[0]))

    return _copy(source, out, kind)


def _copy(source: Path, out: Path, kind: Callable[[gguf.ReaderTensor], str]) -> Path:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        name = gguf.GGMLQuantizationType[kind(tensor)]
        block, block_bytes = gguf.GGML_QUANT_SIZES[name]
        nbytes = int(tensor.n_elements) // block * block_bytes
        writer.add_tensor_info(
            tensor.name,
            (*shape[:-1], shape[-1] // block * block_bytes) if name.name != "F32" else shape,
            np.dtype(np.float32 if name.name == "F32" else np.uint8),
            nbytes,
            None if name.name == "F32" else name,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        data = np.ascontiguousarray(tensor.data).view(np.uint8)
        rows = dequantise(data, tensor.tensor_type.name)
        name = kind(tensor)
        same = name == tensor.tensor_type.name
        writer.write_tensor_data(data if same else rows if name == "F32" else quantise(rows, name))
    writer.close()
    return out

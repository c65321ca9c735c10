"""The same model with its blocks written out as floats: llama.cpp then rounds no activation to 8 bits.

Between two runs of llama.cpp itself on one quantised file (flash attention on and off), rounding alone costs
SmolLM2 a mean KL of 3.5e-3. Against a float32 copy the same weights can be compared thousands of times closer.
"""

from pathlib import Path

import gguf
import numpy as np

from oracles.quantise import dequantise


def f32_copy(source: Path, out: Path) -> Path:
    """Write `out`: all metadata of `source`, every tensor dequantised to F32. One tensor in memory at a time."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), tensor.n_elements * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        data = np.ascontiguousarray(tensor.data).view(np.uint8)
        writer.write_tensor_data(dequantise(data, tensor.tensor_type.name))
    writer.close()
    return out

"""A GGUF file again, with some of its keys and tensors changed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Tensors = dict[str, tuple[Any, gguf.GGMLQuantizationType]]


def rewritten(
    source: Path, path: Path, keys: Mapping[str, Any], change: Callable[[Tensors], object] = lambda t: None
) -> Path:
    """A copy of the model with other values for some keys (of the same type), and with changed tensors.

    `keys` go without the architecture's prefix; a whole number under a new key is added to the file.
    """
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, arch)
    left = dict(keys)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = field.types
            value = left.pop(name.removeprefix(f"{arch}."), field.contents())
            writer.add_key_value(name, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for name, value in left.items():
        writer.add_uint32(f"{arch}.{name}", value)
    tensors: Tensors = {t.name: (t.data, t.tensor_type) for t in reader.tensors}
    change(tensors)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""Architecture name -> the function that reads its `ModelSpec`. One file per architecture in `architectures/`."""

import pkgutil
from collections.abc import Callable
from importlib import import_module

from leanmoe.errors import UnsupportedError
from leanmoe.formats.gguf import GGUFFile
from leanmoe.models import architectures
from leanmoe.models.spec import Metadata, ModelSpec

SpecReader = Callable[[Metadata, GGUFFile], ModelSpec]


def _readers() -> dict[str, SpecReader]:
    modules = [
        import_module(f"{architectures.__name__}.{m.name}")
        for m in pkgutil.iter_modules(architectures.__path__)
    ]
    return {name: reader for module in modules for name, reader in getattr(module, "READERS", {}).items()}


_READERS = _readers()


def supported_architectures() -> list[str]:
    """Names of the GGUF architectures that lean runs."""
    return sorted(_READERS)


def model_spec(gguf: GGUFFile) -> ModelSpec:
    """The spec of the model that `gguf` (a source file or a pack's trunk) describes; reads the header only.

    Raises `UnsupportedError` for an architecture lean does not run, `FormatError` for metadata that is
    missing or out of range.
    """
    reader = _READERS.get(gguf.architecture)
    if reader is None:
        raise UnsupportedError(
            f"{gguf.path}: architecture '{gguf.architecture}' is not supported; "
            f"supported: {', '.join(supported_architectures())}"
        )
    return reader(Metadata(gguf.metadata, gguf.architecture, str(gguf.path)), gguf)

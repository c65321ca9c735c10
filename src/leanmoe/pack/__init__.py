"""The `.lmpack` format: writing, opening and verifying packs. The format's page is docs/format.md."""

from leanmoe.pack.copier import PackProgress
from leanmoe.pack.layout import ExpertLayout, Section
from leanmoe.pack.manifest import LayerManifest, Manifest, SourceFile
from leanmoe.pack.plan import expert_layouts
from leanmoe.pack.reader import Pack, open_pack
from leanmoe.pack.writer import default_output, pack_gguf

__all__ = [
    "ExpertLayout",
    "LayerManifest",
    "Manifest",
    "Pack",
    "PackProgress",
    "Section",
    "SourceFile",
    "default_output",
    "expert_layouts",
    "open_pack",
    "pack_gguf",
]

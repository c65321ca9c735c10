"""The `.lmpack` format: writing, opening and verifying packs. The format's page is docs/format.md."""

from leanmoe.pack.copier import PackProgress
from leanmoe.pack.layout import ExpertLayout, Section
from leanmoe.pack.manifest import LayerManifest, Manifest, SourceFile
from leanmoe.pack.plan import expert_layouts
from leanmoe.pack.reader import AGAIN, Pack, names_pack, open_pack
from leanmoe.pack.slices import is_expert_tensor
from leanmoe.pack.summary import Summary, summarize
from leanmoe.pack.verify import Fault, verify_pack
from leanmoe.pack.writer import default_output, pack_gguf

__all__ = [
    "AGAIN",
    "ExpertLayout",
    "Fault",
    "LayerManifest",
    "Manifest",
    "Pack",
    "PackProgress",
    "Section",
    "SourceFile",
    "Summary",
    "default_output",
    "expert_layouts",
    "is_expert_tensor",
    "names_pack",
    "open_pack",
    "pack_gguf",
    "summarize",
    "verify_pack",
]

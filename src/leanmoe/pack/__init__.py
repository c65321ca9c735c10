"""The `.lmpack` format: writing, opening and verifying packs. The format's page is docs/format.md."""

from leanmoe.pack.copier import PackProgress, ProgressCallback
from leanmoe.pack.export import export_gguf
from leanmoe.pack.layout import ExpertLayout, Section
from leanmoe.pack.manifest import LayerManifest, Manifest, SourceFile
from leanmoe.pack.plan import expert_layouts
from leanmoe.pack.reader import AGAIN, Pack, is_pack, names_pack, open_pack
from leanmoe.pack.slices import is_expert_tensor
from leanmoe.pack.source import GGUFSource, Reader, Source
from leanmoe.pack.summary import Summary, summarize
from leanmoe.pack.verify import Fault, verify_pack
from leanmoe.pack.writer import default_output, pack_gguf, pack_source

__all__ = [
    "AGAIN",
    "ExpertLayout",
    "Fault",
    "GGUFSource",
    "LayerManifest",
    "Manifest",
    "Pack",
    "PackProgress",
    "ProgressCallback",
    "Reader",
    "Section",
    "Source",
    "SourceFile",
    "Summary",
    "default_output",
    "expert_layouts",
    "export_gguf",
    "is_expert_tensor",
    "is_pack",
    "names_pack",
    "open_pack",
    "pack_gguf",
    "pack_source",
    "summarize",
    "verify_pack",
]

"""Downloads a model from a hub and packs it. Interrupted at any point, the same call goes on where it was."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path

from leanmoe.convert import CheckpointSource
from leanmoe.errors import LeanError, UsageError
from leanmoe.formats.gguf import GGUFFile, read_gguf
from leanmoe.formats.gguf_header import read_header
from leanmoe.formats.safetensors import read_safetensors
from leanmoe.hub.arrival import Arrival
from leanmoe.hub.choose import Choice, RemoteFile, choose_files
from leanmoe.hub.download import COMMIT_NOTE, Download, hub_errors
from leanmoe.pack import GGUFSource, ProgressCallback, Source, pack_source
from leanmoe.pack.journal import JOURNAL

_REFERENCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?::(?P<quant>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True)
class Pulled:
    """A finished pull: the pack, and the commit of the repository that it was made from."""

    pack: Path
    commit: str


def parse_reference(text: str) -> tuple[str, str | None, str | None]:
    """Repository, tag and revision in `OWNER/NAME[:TAG][@REVISION]`. Raises `UsageError` for anything else."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text}' is no repository; write it like OWNER/NAME or OWNER/NAME:Q4_K_M")
    return match["repo"], match["quant"], match["revision"]


def pull(
    reference: str,
    out: Path | None = None,
    *,
    keep: bool = False,
    overlap: bool = False,
    endpoint: str | None = None,
    check: Callable[[GGUFFile], object] = lambda gguf: None,
    downloading: ProgressCallback | None = None,
    packing: ProgressCallback | None = None,
) -> Pulled:
    """Fetches the model `OWNER/NAME[:TAG][@REVISION]` and packs it into `out` (default: NAME[-TAG].lmpack here).

    With `overlap` each file is packed while the next is being fetched, instead of after the last.
    Files go to a directory beside `out`, which is removed once the pack is whole, unless `keep`. `endpoint` is the
    address of the hub, else that of huggingface_hub. `check` is called with the model's header before packing.

    Raises `UsageError` for a repository that cannot be had or has no such model, `BudgetError` if the disk is too
    small, `LeanError` if the hub cannot be reached, and as `pack_source`.
    """
    repo, quant, revision = parse_reference(reference)
    name = repo.split("/")[1].removesuffix("-GGUF") + (f"-{quant}" if quant else "")
    out = out or Path(f"{name}.lmpack")
    folder = out.with_name(out.stem + ".download")
    if os.path.lexists(out):
        return _finish(out, folder)
    commit, files = _list(repo, revision, endpoint)
    choice = choose_files(repo, files, quant)
    download = Download(repo, commit, folder, endpoint, downloading)
    with download.claimed():
        if overlap:
            _pack_arriving(download, choice, name, out, keep, check, packing)
        else:
            download.fetch(choice)
            _pack(folder, choice, name, out, keep, check, packing)
        if not keep:
            shutil.rmtree(folder)
    return Pulled(out, commit)


def _pack(
    folder: Path,
    choice: Choice,
    name: str,
    out: Path,
    keep: bool,
    check: Callable[[GGUFFile], object],
    packing: ProgressCallback | None,
    arrive: Callable[[Path], None] | None = None,
) -> None:
    source: Source
    if choice.gguf:
        source = GGUFSource(read_gguf(folder / choice.files[0].name), arrive, marks=False)
    else:
        source = CheckpointSource(folder, choice.quant, name=name, arrive=arrive)
    check(source.gguf)
    pack_source(source, out, consume=choice.gguf and not keep, progress=packing)


def _pack_arriving(
    download: Download,
    choice: Choice,
    name: str,
    out: Path,
    keep: bool,
    check: Callable[[GGUFFile], object],
    packing: ProgressCallback | None,
) -> None:
    """Fetches settings and the headers of all files first, then each file while those before it are packed."""
    download.total = choice.nbytes
    large = tuple(file for file in choice.files if file.name.endswith((".gguf", ".safetensors")))
    for file in choice.files:
        if file in large:
            download.stub(file, _has_header)
        else:
            download.fetch_file(file)
    with Arrival(download, large) as arrive:
        _pack(download.folder, choice, name, out, keep, check, packing, arrive)


def _has_header(path: Path, there: int) -> bool:
    """Whether the first `there` bytes of a file, the rest of which is zeros, hold its header."""
    try:
        reads_gguf = path.name.removesuffix(".new").endswith(".gguf")
        start = read_header(path).data_start if reads_gguf else read_safetensors(path)[1]
    except LeanError:
        return False
    return start <= there


def _finish(out: Path, folder: Path) -> Pulled:
    """`out` exists. If it is a pack whose download was still to be deleted, deletes that."""
    journal, note = out / JOURNAL, folder / COMMIT_NOTE
    if not journal.is_file() or not note.is_file():
        raise UsageError(f"{out}: already exists; delete it, or give another name")
    commit = note.read_text()
    shutil.rmtree(folder)
    journal.unlink()
    return Pulled(out, commit)


def _list(repo: str, revision: str | None, endpoint: str | None) -> tuple[str, list[RemoteFile]]:
    """The commit that `revision` means now, and its files."""
    from huggingface_hub import HfApi

    with hub_errors(repo):
        try:
            info = HfApi(endpoint=endpoint).model_info(repo, revision=revision, files_metadata=True)
        except (JSONDecodeError, TypeError, LookupError, AttributeError) as error:
            raise LeanError(f"{repo}: the hub's answer is no list of files: {error!r}") from error
    files = [
        RemoteFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or ()
    ]
    for file in files:
        parts = Path(file.name).parts
        if Path(file.name).is_absolute() or ".." in parts or "\0" in file.name:
            raise UsageError(f"{repo}: has a file named {file.name[:80]!r}, which leads out of its folder")
        if type(file.nbytes) is not int or file.nbytes < 0:
            raise LeanError(f"{repo}: the hub gives {file.name} a size of {file.nbytes!r}")
    if not info.sha or not re.fullmatch(r"\w{1,64}", info.sha):
        raise LeanError(f"{repo}: the hub names no commit for it")
    return info.sha, files

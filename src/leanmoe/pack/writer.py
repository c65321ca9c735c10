"""Writes a pack from a model. The order of writing, and what a kill leaves behind: docs/format.md."""

import errno
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import blake3

from leanmoe.errors import BudgetError, FormatError, UsageError
from leanmoe.formats.gguf import GGUFFile, read_gguf
from leanmoe.pack.consume import is_marked
from leanmoe.pack.copier import Copier, PackProgress, ProgressCallback, sync_directory
from leanmoe.pack.digests import DIGESTS, EXPERTS, MANIFEST, format_digests
from leanmoe.pack.journal import JOURNAL, Fingerprint, Journal, recorded_consumer
from leanmoe.pack.plan import PackPlan, plan_pack
from leanmoe.pack.source import GGUFSource, Source
from leanmoe.pack.steps import finished_parts, peak_growth, plan_steps
from leanmoe.units import format_bytes

_SPLIT_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
_SMALL = 1 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def default_output(source: Path) -> Path:
    """The pack made of `source` where no name is given: beside it, NAME.lmpack."""
    return source.with_name(_SPLIT_SUFFIX.sub("", source.stem) + ".lmpack")


def pack_gguf(
    source: Path | str,
    out: Path | str,
    *,
    consume: bool = False,
    progress: ProgressCallback | None = None,
    check: Callable[[GGUFFile], object] | None = None,
) -> Path:
    """Packs the GGUF model `source` (any shard of a split one) into the directory `out`, and returns `out`.

    Writes to `out`.partial, which a later call with the same arguments resumes, and renames it last. With
    `consume` the source's bytes are freed as they are packed, and its files deleted at the end.
    `check` is called with the model's header before anything is written, to refuse it by an error of its own.

    Raises `UsageError` if `out` exists or the source cannot be consumed, `BudgetError` if the disk is too
    small, `FormatError` and `UnsupportedError` for a source that is damaged, changed, or cannot be packed.
    """
    source, out = Path(source), Path(out)
    if source.is_dir():
        found = "is a pack already" if (source / MANIFEST).exists() else "is a directory"
        raise UsageError(f"{source}: {found}; a GGUF file was wanted")
    try:
        if os.path.lexists(out):
            _finish_consuming(source, out, consume)
        else:
            consumer = recorded_consumer(_partial(out))
            gguf = read_gguf(source, consumer=consumer)
            if check is not None:
                check(gguf)
            if consumer is None:
                _check_holes(gguf.shards)
            pack_source(GGUFSource(gguf), out, consume=consume, progress=progress)
    except OSError as error:
        raise _stopped(out, error) from error
    return out


def pack_source(
    source: Source, out: Path | str, *, consume: bool = False, progress: ProgressCallback | None = None
) -> Path:
    """Packs any `source` into the directory `out`, which must not exist yet; else as `pack_gguf`."""
    out = Path(out)
    try:
        _pack(source, out, consume, progress)
    except OSError as error:
        raise _stopped(out, error) from error
    return out


def _check_holes(shards: Iterable[Path]) -> None:
    """Refuses a file most of which is holes, which would be packed as zeros. Raises `FormatError`, `OSError`."""
    for shard in shards:
        with shard.open("rb") as file:
            if os.fstat(file.fileno()).st_blocks * 512 * 4 < shard.stat().st_size:
                os.fsync(file.fileno())  # some file systems count blocks late
            state = os.fstat(file.fileno())
        if state.st_blocks * 512 * 4 < state.st_size and state.st_size > _SMALL:
            raise FormatError(
                f"{shard}: of its {format_bytes(state.st_size)} only {format_bytes(state.st_blocks * 512)} are on the "
                "disk: a header alone, or a download that is not complete; fetch it again"
            )


def _stopped(out: Path, error: OSError) -> UsageError:
    return UsageError(f"{error.filename or out}: packing stopped: {error.strerror or error}")


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _exists(out: Path) -> UsageError:
    found = "there is such a pack already" if (out / MANIFEST).is_file() else "already exists"
    return UsageError(f"{out}: {found}; give another name, or delete it first to make it again")


def _pack(source: Source, out: Path, consume: bool, progress: ProgressCallback | None) -> None:
    if os.path.lexists(out):
        raise _exists(out)
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such directory; the pack {out.name} was to be written there")
    if consume:
        source.check_consumable()
    plan = plan_pack(source)
    partial = _partial(out)
    partial.mkdir(exist_ok=True)
    journal = Journal(partial)
    try:
        _fill(partial, plan, journal, source, consume, progress)
        if not consume:
            journal.path.unlink()
            sync_directory(partial)
        os.rename(partial, out)
        sync_directory(out.parent)
        if consume:
            _delete_source(source.files, out)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        wanted = _space_wanted(plan, journal, frees_source=False)
        raise BudgetError(
            f"{error.filename or partial}: {error.strerror}; what is left to pack takes "
            f"{format_bytes(wanted)} ({wanted} bytes): make room and run lean pack again to resume"
        ) from error
    finally:
        journal.close()


def _finish_consuming(source: Path, out: Path, consume: bool) -> None:
    """`out` exists. If it is a finished pack whose source was still to be deleted, deletes that."""
    if consume and (out / JOURNAL).is_file():
        journal = Journal(out)
        try:
            files = journal.source.files if journal.source else ()
            if journal.consumer is not None and any(name == source.name for name, _, _ in files):
                shards = (source.with_name(name) for name, _, _ in files)
                _delete_source([s for s in shards if is_marked(s, journal.consumer)], out)
                return
        finally:
            journal.close()
    raise _exists(out)


def _delete_source(shards: Iterable[Path], out: Path) -> None:
    for shard in shards:
        shard.unlink()
    (out / JOURNAL).unlink()
    sync_directory(out)


def _fill(
    partial: Path,
    plan: PackPlan,
    journal: Journal,
    source: Source,
    consume: bool,
    progress: ProgressCallback | None,
) -> None:
    """Makes `partial` a complete pack but for its name and the journal in it."""
    manifest = plan.manifest.to_json()
    fingerprint = Fingerprint.of(blake3.blake3(manifest).hexdigest(), source.files)
    if journal.source is None and _was_complete(partial, manifest):
        return
    fresh = journal.source is None
    journal.check(fingerprint, consume)
    _drop_unrecorded(partial, plan, journal)
    try:
        _check_space(partial.parent, plan, journal, source, consume)
    except BudgetError:
        if fresh:
            journal.path.unlink()
            partial.rmdir()
        raise
    journal.begin(fingerprint, consume)
    (partial / EXPERTS).mkdir(exist_ok=True)
    _write_targets(partial, plan, journal, source, progress)
    if not consume and Fingerprint.of(fingerprint.manifest_digest, source.files) != fingerprint:
        raise FormatError(f"{source.files[0]}: changed while it was packed; delete {partial} and pack again")
    digests = {MANIFEST: blake3.blake3(manifest).digest()}
    digests |= {target.name: journal.digests[target.name] for target in plan.targets}
    _write_file(partial / MANIFEST, manifest)
    _write_file(partial / DIGESTS, format_digests(digests))
    sync_directory(partial)


def _was_complete(partial: Path, manifest: bytes) -> bool:
    """Whether an earlier run was killed between removing its journal and the last step, the renaming."""
    if (partial / DIGESTS).exists() and (partial / MANIFEST).read_bytes() == manifest:
        return True
    if os.listdir(partial) != [JOURNAL]:
        raise UsageError(f"{partial}: holds files of another pack; delete it and run lean pack again")
    return False


def _drop_unrecorded(partial: Path, plan: PackPlan, journal: Journal) -> None:
    """Cuts off what is not recorded as on disk. Refuses if recorded bytes are gone, and the source's too."""
    for target in plan.targets:
        path = partial / target.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            size = 0
        recorded = target.nbytes if target.name in journal.digests else journal.marks.get(target.name, 0)
        if size < recorded:
            if journal.consuming:
                raise FormatError(
                    f"{path}: {size} bytes long, but {recorded} were written and freed from the source; "
                    f"fetch the source again and delete {partial}"
                )
            journal.forget(target.name)
            recorded = 0
        if size > recorded:
            os.truncate(path, recorded)


def _check_space(parent: Path, plan: PackPlan, journal: Journal, source: Source, consume: bool) -> None:
    wanted = _space_wanted(
        plan, journal, consume and all(s.stat().st_dev == parent.stat().st_dev for s in source.files)
    )
    advice = ", or give --consume" if isinstance(source, GGUFSource) and not consume else ""
    space = os.statvfs(parent)
    free = space.f_bavail * space.f_frsize
    if wanted > free:
        raise BudgetError(
            f"{parent}: packing needs {format_bytes(wanted)} ({wanted} bytes) more, but {format_bytes(free)} "
            f"({free} bytes) are free; make room{advice}"
        )
    files = len(plan.targets) + len(plan.manifest.layers) - len(journal.digests)
    if space.f_files and files > space.f_favail:
        raise BudgetError(
            f"{parent}: packing makes {files} files; its file system takes {space.f_favail} more"
        )


def _space_wanted(plan: PackPlan, journal: Journal, frees_source: bool) -> int:
    """The bytes of disk that the rest of a pack needs at its worst moment."""
    steps = plan_steps(plan.targets, journal.digests, journal.marks)
    # Beside the targets: the manifest, and for each target a line in the journal and one in the digests.
    lists = len(plan.manifest.to_json()) + 256 * len(plan.targets)
    return peak_growth(steps, frees_source) + lists


def _write_targets(
    partial: Path,
    plan: PackPlan,
    journal: Journal,
    source: Source,
    progress: ProgressCallback | None,
) -> None:
    finished = finished_parts(plan.targets, journal.digests, journal.marks)
    done, total = sum(part.end for part in finished), plan.nbytes

    def report(nbytes: int, name: str) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(PackProgress(done, total, name))

    with Copier(partial, source, journal, report) as copier:
        copier.free(finished)
        trunk, *experts = plan.targets
        targets = (*experts, trunk) if source.arriving else plan.targets
        for step in plan_steps(targets, dict(journal.digests), dict(journal.marks)):
            copier.write_step(step)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

"""Downloads the files of one commit of a repository, going on with what an earlier run left half done.

huggingface_hub makes the requests and repeats them when a connection drops. Across runs it keeps no half file, so that
is done here: `NAME.part` grows until it is whole. A hub that stores files in chunks (Xet) is left to the library, which
keeps the chunks itself.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanmoe.errors import BudgetError, FormatError, LeanError, UsageError
from leanmoe.hub.choose import Choice, RemoteFile
from leanmoe.pack import PackProgress, ProgressCallback
from leanmoe.units import format_bytes

COMMIT_NOTE = "commit"
_CHUNK = 4 << 20
_HEAD = 4 << 20  # what is fetched of a file at first to read its header


@dataclass(slots=True)
class Download:
    """Fetches files of `commit` of `repo` into `folder`, reporting the bytes of all of them."""

    repo: str
    commit: str
    folder: Path
    endpoint: str | None
    report: ProgressCallback | None
    done: int = 0
    total: int = 0

    def fetch(self, choice: Choice) -> None:
        """Fetches those files of `choice` that are not there yet.

        Raises `BudgetError` if the disk is too small, `FormatError` for a file that is not what the hub says,
        `LeanError` if it cannot be reached.
        """
        self.total = choice.nbytes
        missing = sum(file.nbytes - self._there(file) for file in choice.files)
        free = shutil.disk_usage(self.folder).free
        if missing > free:
            raise BudgetError(
                f"{self.folder}: the download takes {format_bytes(missing)} ({missing} bytes) more; "
                f"{format_bytes(free)} ({free} bytes) are free"
            )
        for file in choice.files:
            self.fetch_file(file)

    def fetch_file(self, file: RemoteFile) -> None:
        """Fetches one file unless it is there. Raises as `fetch`."""
        before = self.done
        whole = self.folder / file.name
        if not whole.is_file() or self._stub_note(file).exists():
            with hub_errors(self.repo):
                self._fetch(file)
            self._stub_note(file).unlink(missing_ok=True)
        self._advance(before + file.nbytes - self.done, file.name)

    def stub(self, file: RemoteFile, complete: Callable[[Path, int], bool]) -> None:
        """Makes a file of the right size that holds the beginning of `file` alone: as much as makes it `complete`,
        which is asked with the path and the bytes that are there. The rest reads as zeros. Nothing is done if `file`,
        or its stub, is there. Raises as `fetch`.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        path, note = self.folder / file.name, self._stub_note(file)
        if path.is_file():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
        new = path.with_name(path.name + ".new")
        nbytes = min(_HEAD, file.nbytes)
        while True:
            with hub_errors(self.repo), new.open("wb") as out:
                url = hf_hub_url(self.repo, file.name, revision=self.commit, endpoint=self.endpoint)
                headers = build_hf_headers() | {"Range": f"bytes=0-{nbytes - 1}"}
                bar = self._bar(file.name, counts=False)
                http_get(url, out, headers=headers, expected_size=nbytes, tqdm_class=bar)
                out.truncate(file.nbytes)
            if complete(new, nbytes):
                break
            if nbytes == file.nbytes:
                new.unlink()
                raise FormatError(
                    f"{self.repo}: {file.name} came with a header that cannot be read; run it again to fetch it anew"
                )
            nbytes = min(4 * nbytes, file.nbytes)
        os.utime(new, ns=(0, 0))
        new.rename(path)

    def _stub_note(self, file: RemoteFile) -> Path:
        return self.folder / f"{file.name}.stub"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Makes the folder, or checks that it holds files of the same commit; nobody else may fetch into it meanwhile.
        Raises `UsageError`.
        """
        try:
            self.folder.mkdir(exist_ok=True)
            fd = os.open(self.folder / COMMIT_NOTE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"{self.folder}: cannot be written: {error.strerror}") from error
        with os.fdopen(fd, "r+", errors="replace") as note:
            try:
                fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{self.folder}: another lean pull is fetching into it; wait for it to finish"
                ) from None
            begun = note.read()
            if not begun:
                note.write(self.commit)
                note.flush()
            elif begun != self.commit:
                raise UsageError(
                    f"{self.folder}: holds part of another version of {self.repo}; delete it to start over, or go on "
                    f"with @{begun[:40]}"
                )
            yield

    def _there(self, file: RemoteFile) -> int:
        whole, part = self.folder / file.name, self._part(file)
        paths = (part,) if self._stub_note(file).exists() else (whole, part)
        found = next((path for path in paths if path.is_file()), None)
        return min(found.stat().st_size, file.nbytes) if found else 0

    def _part(self, file: RemoteFile) -> Path:
        return self.folder / f"{file.name}.part"

    def _fetch(self, file: RemoteFile) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self.repo, file.name, revision=self.commit, endpoint=self.endpoint)
        metadata = get_hf_file_metadata(url, endpoint=self.endpoint)
        if metadata.xet_file_data is not None:
            hf_hub_download(
                self.repo,
                file.name,
                revision=self.commit,
                local_dir=self.folder,
                endpoint=self.endpoint,
                tqdm_class=self._bar(file.name),
            )
            return
        part = self._part(file)
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as out:
            had = out.tell()
            if had > file.nbytes:
                out.truncate(0)
                had = 0
            self._advance(had, file.name)
            http_get(
                url,
                out,
                resume_size=had,
                headers=build_hf_headers(),
                expected_size=metadata.size,
                tqdm_class=self._bar(file.name),
            )
        self._check(file, part)
        os.utime(part, ns=(0, 0))  # as its stub's, so that what is packed is known to be of the same source
        part.rename(self.folder / file.name)

    def _check(self, file: RemoteFile, part: Path) -> None:
        """A file put together from several answers could hold parts of different files."""
        size = part.stat().st_size
        hasher = hashlib.sha256()
        if file.sha256 is not None:
            with part.open("rb") as whole:
                while chunk := whole.read(_CHUNK):
                    hasher.update(chunk)
        if size != file.nbytes or (file.sha256 is not None and hasher.hexdigest() != file.sha256):
            part.unlink()
            raise FormatError(
                f"{self.repo}: {file.name} came with {size} bytes that are not those the hub lists "
                f"({file.nbytes} bytes); run it again to fetch it anew"
            )

    def _advance(self, nbytes: int, name: str) -> None:
        self.done = min(self.done + nbytes, self.total)
        if self.report is not None and nbytes:
            self.report(PackProgress(self.done, self.total, name))

    def _bar(self, name: str, *, counts: bool = True) -> type[Any]:
        """A progress bar as the library wants one, that draws nothing and tells `report` if it `counts`."""
        from tqdm.auto import tqdm

        def advance(nbytes: int, name: str) -> None:
            if counts:
                self._advance(nbytes, name)

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                options.pop("name", None)
                super().__init__(*arguments, **{**options, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                advance(int(n or 0), name)
                return None

        return Bar


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turns the errors of the library and of the network into lean's, each naming the repository."""
    from huggingface_hub import errors

    # The library's own errors derive from those of its network library, whichever that is.
    bases: tuple[Any, ...] = errors.HfHubHTTPError.__bases__
    try:
        yield
    except LeanError:
        raise
    except errors.GatedRepoError as error:
        raise UsageError(
            f"{repo}: is gated; accept its terms on the hub, then log in with: hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"{repo}: no such repository, or a private one; log in with: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UsageError(f"{repo}: has no such revision") from error
    except errors.HFValidationError as error:
        raise UsageError(f"{repo}: is no name of a repository") from error
    except (errors.OfflineModeIsEnabled, *bases) as error:
        lines = str(error).strip().splitlines()
        raise LeanError(
            f"{repo}: fetching stopped: {lines[0] if lines else type(error).__name__}; run it again to go on"
        ) from error

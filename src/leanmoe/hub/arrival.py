"""Files that are packed while the next ones are still being fetched."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from leanmoe.errors import LeanError
from leanmoe.hub.choose import RemoteFile
from leanmoe.hub.download import Download


class Arrival:
    """Fetches files in order on a thread of its own, at most one beyond those that have been waited for, so that the
    disk needs no room for all of them. A context manager: leaving it stops before the next file.
    """

    def __init__(self, download: Download, files: tuple[RemoteFile, ...]) -> None:
        self._download = download
        self._order = {download.folder / file.name: number for number, file in enumerate(files)}
        self._files = files
        self._changed = threading.Condition()
        self._arrived = 0
        self._wanted = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lean-download", daemon=True)

    def __enter__(self) -> Callable[[Path], None]:
        """A function that waits until a file is there, and raises what stopped its fetching."""
        self._thread.start()
        return self._wait

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _wait(self, path: Path) -> None:
        number = self._order.get(path)
        if number is None:
            return
        with self._changed:
            self._wanted = max(self._wanted, number)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._arrived > number or self._error is not None)
            if self._arrived <= number and self._error is not None:
                if isinstance(self._error, LeanError):
                    raise self._error
                raise LeanError(f"{path}: could not be fetched: {self._error}") from self._error

    def _run(self) -> None:
        for number, file in enumerate(self._files):
            with self._changed:
                while not self._stopped and number > self._wanted + 1:
                    self._changed.wait()
                if self._stopped:
                    return
            try:
                self._download.fetch_file(file)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._arrived = number + 1
                self._changed.notify_all()

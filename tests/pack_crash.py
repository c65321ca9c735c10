"""Runs a function in a child process that dies, as by `kill -9` or a power cut, at the nth step it takes on disk."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SURVIVED, FAILED = 0, 97
_STEPS = ("write", "pwrite", "fsync", "mkdir", "rename", "unlink", "truncate", "ftruncate", "open", "rmdir")


def run_and_die(act: Callable[[], object], nth: int, *, power_cut: Path | None = None) -> bool:
    """Runs `act` in a child that is killed as it begins its nth step on disk; True if it ended before.

    A write is torn: half of it happens, but for one in place (`pwrite`), which is all within a sector. With
    `power_cut`, the files under that directory moreover lose all that was not synced. Fails if `act` raises.
    """
    child = os.fork()
    if child == 0:
        try:
            _Killer(nth, power_cut).install()
            act()
            os._exit(SURVIVED)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(FAILED)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == SURVIVED, "the child raised; its traceback is on stderr"
    return True


class _Killer:
    """Counts the calls that change the disk, and remembers which bytes of which file have been synced."""

    def __init__(self, nth: int, power_cut: Path | None) -> None:
        self.left, self.power_cut = nth, power_cut
        self.lock = threading.Lock()
        # By inode, since files are renamed; what was there before is taken to be on disk.
        self.synced = {inode: size for inode, size, _ in self._files()}
        self.real = {name: getattr(os, name) for name in _STEPS}
        self.overwritten: dict[
            int, tuple[int, int, bytes]
        ] = {}  # not synced: by inode, a descriptor, offset, bytes

    def install(self) -> None:
        for name in _STEPS:
            setattr(os, name, self._wrapped(name))

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = self.real[name]

        def step(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            with self.lock:
                self.left -= 1
                if self.left == 0:
                    if name == "write":
                        real(args[0], bytes(args[1])[: len(args[1]) // 2])
                    self._die()
                if name == "pwrite":
                    fd, data, offset = args
                    before = os.dup(fd), offset, os.pread(fd, len(data), offset)
                    self.overwritten.setdefault(os.fstat(fd).st_ino, before)
                result = real(*args, **kwargs)
                if name == "fsync":
                    info = os.fstat(args[0])
                    self.synced[info.st_ino] = info.st_size
                    self.overwritten.pop(info.st_ino, None)
                return result

        return step

    def _die(self) -> None:
        if self.power_cut is not None:
            for fd, offset, data in self.overwritten.values():
                self.real["pwrite"](fd, data, offset)
            for inode, size, path in self._files():
                kept = self.synced.get(inode)
                if kept is None:
                    self.real["unlink"](path)
                elif kept < size:
                    self.real["truncate"](path, kept)
        os.kill(os.getpid(), signal.SIGKILL)

    def _files(self) -> list[tuple[int, int, Path]]:
        paths = self.power_cut.rglob("*") if self.power_cut is not None else ()
        return [(path.stat().st_ino, path.stat().st_size, path) for path in paths if path.is_file()]

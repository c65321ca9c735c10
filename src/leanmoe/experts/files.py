"""Small files that must be whole or not be there: written beside their place, then put into it."""

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Makes `data` the content of `path` in one step that a crash cannot halve. Raises `OSError`."""
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

"""Files that are there as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, data: bytes | str) -> Path:
    """Write a file beside the one of that name, which it then replaces at once.

    Args:
        path: The file; its folder is made.
        data: Its content; text is written as UTF-8, and line ends as they are.

    Raises:
        OSError: It cannot be written, and names the file; what was there before is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(new, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
    return path

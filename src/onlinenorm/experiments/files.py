"""Files that are written whole or not at all."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from onlinenorm.experiments.errors import ExperimentError


def write_whole(path: Path, content: bytes | str) -> None:
    """Replace a file's content; whatever happens meanwhile, the file has either the old or the new one.

    Raises:
        ExperimentError: it can't be written; the old content is still there.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
        raise ExperimentError(f"Cannot write {path}: {error.strerror}. What was there is kept; {advice}.") from error

"""A full disk (ENOSPC, a used up quota, a limit of a file's size), said in words: bytes needed, and bytes there."""

from __future__ import annotations

import errno
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshkit.errors import MeshkitError


def no_space(error: BaseException, folder: Path, needed: int | None) -> str | None:
    """What to say of an error that came while `needed` bytes were written to `folder`; None if it was for another reason.

    error: of Python, or of a library in Rust that says "(os error 28)" in its text.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (said := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(said[1])
    wanted = "" if needed is None else f"{needed:,} bytes needed, "
    if number == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = "what the file system takes" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
        return (
            f"No space left in a file of {folder}: {wanted}and a file may have {most}. Raise the limit (ulimit -f), or give "
            "another folder."
        )
    if number not in (errno.ENOSPC, errno.EDQUOT):
        return None
    try:
        there = f"{shutil.disk_usage(folder).free:,} bytes there"
    except OSError:
        there = "nobody says how many are there"
    quota = " by the quota" if number == errno.EDQUOT else ""
    return f"No space left{quota} in {folder}: {wanted}{there}. Make room, or give another folder."


@contextmanager
def telling_of_a_full_disk(
    kind: type[MeshkitError], action: str, folder: Path, needed: int | None = None
) -> Iterator[None]:
    """Inside, an error of a full disk becomes one of this kind, which begins with `action`; all others stay as they are."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MeshkitError) or (told := no_space(error, folder, needed)) is None:
            raise
        raise kind(f"{action}: {told}") from error

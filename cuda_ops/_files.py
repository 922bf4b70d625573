"""Output files that the user names (--save, --out), written whole or not at all.

What is written lies under a name of its own beside its target until its last byte is there, and is renamed then: a
reader never sees half a file, and what stood there stays until it is replaced. Otherwise it is as if the file were
opened and written to: symbolic links are followed, a new file has the mode that the umask leaves, an old one keeps its.

Every OSError of these functions names the file that was asked for, and says why in `strerror`.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def write_files(contents: Mapping[Path, bytes]):
    """Writes all of them, or on any error that comes before the first one is renamed (a full disk, a folder that is
    read-only, a name that something else has) none."""
    drafts = []
    try:
        for path, content in contents.items():
            with _naming(path):
                target, mode = _target(path)
                drafts.append((_draft_name(target), target, path))
                _write(drafts[-1][0], content, mode)
        for draft, target, path in drafts:
            with _naming(path):
                os.replace(draft, target)
    finally:
        for draft, *_ in drafts:
            with contextlib.suppress(OSError):  # the renamed ones are gone
                os.unlink(draft)


def write_file(path: Path, content: bytes):
    """Writes one file, or on any error none."""
    write_files({path: content})


def check_writable(path: Path):
    """Raises what `write_file` would, as far as it can be known before there is anything to write; leaves nothing."""
    with _naming(path):
        target, mode = _target(path)
        draft = _draft_name(target)
        try:
            _write(draft, b"", mode)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """The error of a write names no file, and that of a rename the draft."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _target(path: Path) -> tuple[Path, int | None]:
    """What the name leads to, and its mode if it is there."""
    target = Path(os.path.realpath(path))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return target, None
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is a {KINDS[stat.S_IFMT(mode)]}, not a regular file")
    if not os.access(path, os.W_OK):  # a rename would not ask
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return target, stat.S_IMODE(mode)


def _draft_name(target: Path) -> Path:
    return target.with_name(f".{secrets.token_hex(8)}.partial")


def _write(draft: Path, content: bytes, mode: int | None):
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(descriptor, "wb") as file:
        if mode is not None:
            os.fchmod(descriptor, mode)
        file.write(content)
        file.flush()
        os.fsync(descriptor)  # where space is allocated late, this is what tells that there is none

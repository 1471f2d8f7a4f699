"""A folder below TMPDIR for the sockets, snapshots and logs of one process, which nobody else may enter.

It is locked as long as its owner lives, however that ends. So what a killed owner left can be told from what a living one has,
also by a process in another container, for which the owner's number means nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ringtmp.errors import UsageError
from ringtmp.system.files import require_text

#: Not "ringtmp-", under which versions before this one kept theirs without a lock: neither removes what the other has.
_PREFIX = "ringtmp_"


class PrivateFolder:
    """There, and locked, from the start; `remake` it now and then where a cleaner of temporary files might come by."""

    def __init__(self) -> None:
        parent = require_text(Path(tempfile.gettempdir()), "TMPDIR")
        self.path = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        self._lock = self._made()

    def remake(self) -> None:
        """It is there again if it was gone; what was in it is not."""
        if self._lock != -1 and _is(self.path, self._lock):
            return
        self._unlock()
        self._lock = self._made()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _made(self) -> int:
        """Between its making and its locking another process may have taken it for a leftover: then once more."""
        while True:
            try:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise UsageError(
                    f"{self.path} cannot be made: {error.strerror}; set TMPDIR to another folder"
                ) from error
            with contextlib.suppress(OSError):  # a file system without locks: then nobody can take it for a leftover
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is(self.path, descriptor):
                return descriptor
            os.close(descriptor)

    def _unlock(self) -> None:
        if self._lock != -1:
            os.close(self._lock)
            self._lock = -1


def remove_leftovers() -> None:
    """Folders of masters and agents that were killed: nobody holds their lock."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        with _locked(path) as mine:
            if mine:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # somebody else's, or no folder
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False

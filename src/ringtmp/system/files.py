"""Files that are there whole or not at all, and names that can be told to others. No torch import: agents write some too."""

from __future__ import annotations

import os
import secrets
from datetime import UTC, datetime
from pathlib import Path

from ringtmp.errors import UsageError


def write_atomic(path: Path, content: bytes, mode: int = 0o666, durable: bool = True) -> None:
    """Whoever reads meanwhile reads what was there before; a full disk leaves that, and nothing half written beside it.
    `durable`: it survives a power cut, at the price of waiting for the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """A file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Where measurements and exports are kept for the next run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringtmp"


def default_run_dir() -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{stamp}-{secrets.token_hex(2)}"


def require_text(path: Path, what: str) -> Path:
    """Its name goes into messages and JSON, which are UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{what} {str(path)!a} is not valid UTF-8: if it should be, set PYTHONUTF8=1 (your locale is not UTF-8); "
            "otherwise choose another folder"
        ) from None
    return path

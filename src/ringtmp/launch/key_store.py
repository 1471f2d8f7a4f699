"""Who we are and whom we admit: key pairs and rings in the user's config directory, readable by the user alone.

    ~/.config/ringtmp/identity.json      this device's own key pair
                      rings/home.json    a ring this device is master of: its key pair, its nodes, its open tokens

A ring outlives its runs. Tokens are kept as digests: who reads the file cannot join with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from ringtmp.errors import UsageError
from ringtmp.launch.device_names import checked_name
from ringtmp.system.files import write_atomic
from ringtmp.transport.encryption import KeyPair, new_key_pair

T = TypeVar("T")
TOKEN_LIFE_S = 3600.0
SECRET_BYTES = 16


def config_dir() -> Path:
    if given := os.environ.get("RINGTMP_CONFIG"):
        return Path(given)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ringtmp"


class Admitted(msgspec.Struct, frozen=True):
    key: str
    name: str


class OpenToken(msgspec.Struct, frozen=True):
    digest: str
    expires_at: float  # seconds since 1970 on the master's own clock
    uses_left: int


class RingFile(msgspec.Struct, frozen=True):
    public: str
    secret: str
    nodes: tuple[Admitted, ...] = ()
    revoked: tuple[str, ...] = ()
    tokens: tuple[OpenToken, ...] = ()
    address: str = ""  # host:port the ring last listened on
    released: tuple[str, ...] = ()  # keys of devices that sit out the run under way

    @property
    def keys(self) -> KeyPair:
        return KeyPair(self.public, self.secret)


def identity(folder: Path | None = None) -> KeyPair:
    """This device's own key pair, made on first use."""
    path = (folder or config_dir()) / "identity.json"
    with _locked(path):
        if path.exists():
            return KeyPair(*_read(path, tuple[str, str]))
        keys = new_key_pair()
        _write(path, tuple(keys))
        return keys


class Rings:
    """The rings of this user. Every change is read, made and written under a lock."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (folder or config_dir()) / "rings"
        self._seen: dict[Path, tuple[tuple[int, int, int], RingFile]] = {}

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("*.json"))

    def open(self, name: str, create: bool = False) -> RingFile:
        """A file that is still the one read last is not read again: masters ask several times a second. Every change makes a
        new file, by renaming."""
        path = self._path(name)
        seen = self._seen.get(path)
        if seen is not None and seen[0] == _which(path):
            return seen[1]
        with _locked(path):
            if path.exists():
                which, ring = _which(path), _read(path, RingFile)
                if which is not None:
                    self._seen[path] = which, ring
                return ring
            if not create:
                known = ", ".join(self.names()) or "none yet"
                raise UsageError(
                    f"no ring {name!r} here (known: {known}): the master makes one with ringtmp train --listen"
                )
            keys = new_key_pair()
            made = RingFile(keys.public, keys.secret)
            _write(path, made)
            return made

    def set_address(self, name: str, address: str) -> None:
        with self._change(name) as (_, save):
            save(address=address)

    def new_secret(self, name: str, uses: int) -> bytes:
        """A fresh secret for `uses` joins within the hour. Only its digest is kept."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with self._change(name) as (ring, save):
            alive = tuple(token for token in ring.tokens if token.expires_at > time.time() and token.uses_left > 0)
            token = OpenToken(_digest(secret), time.time() + TOKEN_LIFE_S, uses)
            save(tokens=(*alive, token))
        return secret

    def admit(self, name: str, secret: bytes, key: str, node: str) -> str | None:
        """Admit a key that knows a valid secret or was admitted before. None when admitted, otherwise the reason."""
        with self._change(name) as (ring, save):
            if (reason := _objection(ring, secret, key)) is not None:
                return reason
            found = _token_of(ring, secret)
            known = any(each.key == key for each in ring.nodes)
            rest = tuple(each for each in ring.nodes if each.key != key)
            tokens = tuple(
                msgspec.structs.replace(token, uses_left=token.uses_left - (0 if known else 1))
                if token is found
                else token
                for token in ring.tokens
            )
            if Admitted(key, node) not in ring.nodes:
                save(nodes=(*rest, Admitted(key, node)), tokens=tokens)
        return None

    def check_secret(self, name: str, secret: bytes, key: str) -> str | None:
        """What `admit` would answer now. Changes nothing."""
        return _objection(self.open(name), secret, key)

    def revoke(self, name: str, node: str) -> Admitted:
        """Take a node's key off the list for good. Its name frees up; its key never comes back."""
        with self._change(name) as (ring, save):
            found = _find(name, ring, node)
            save(nodes=tuple(each for each in ring.nodes if each is not found), revoked=(*ring.revoked, found.key))
        return found

    def release(self, name: str, node: str) -> Admitted:
        """Let a node go from the run under way; it stays admitted."""
        with self._change(name) as (ring, save):
            found = _find(name, ring, node)
            save(released=(*ring.released, found.key))
        return found

    def take_back(self, name: str) -> None:
        """A new run begins: whoever was released may come again."""
        with self._change(name) as (_, save):
            save(released=())

    def _path(self, name: str) -> Path:
        return self._folder / f"{checked_name('ring', name)}.json"

    @contextmanager
    def _change(self, name: str) -> Iterator[tuple[RingFile, Callable[..., None]]]:
        """The ring, and how to save it with other values of some fields."""
        path = self._path(name)
        with _locked(path):
            if not path.exists():
                raise UsageError(f"no ring {name!r} here")
            ring = _read(path, RingFile)
            yield ring, lambda **fields: _write(path, msgspec.structs.replace(ring, **fields))


def _which(path: Path) -> tuple[int, int, int] | None:
    """Tells one file at a path from the next."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _find(name: str, ring: RingFile, node: str) -> Admitted:
    found = [each for each in ring.nodes if node in (each.name, each.key)]
    if not found:
        known = ", ".join(each.name for each in ring.nodes) or "none"
        raise UsageError(f"ring {name} has no node {node!r}: its nodes are {known}")
    if len(found) > 1:  # a device that was set up again has a new key and its old name
        keys = " or ".join(f"-- {shlex.quote(each.key)}" for each in found)
        raise UsageError(
            f"ring {name} has {len(found)} devices named {node!r}: give the key instead (oldest first): {keys}"
        )
    return found[0]


def _objection(ring: RingFile, secret: bytes, key: str) -> str | None:
    if key in ring.revoked:
        return "this device was revoked"
    if any(each.key == key for each in ring.nodes):
        return None  # a device that comes back: its key, proved by CURVE, is worth more than a token that may be old
    found = _token_of(ring, secret)
    if found is None:
        return "the token's secret is wrong or belongs to another ring"
    if found.expires_at < time.time():
        return "the token has expired: ask the master for a new one (ringtmp ring token)"
    if found.uses_left < 1:
        return "the token is used up: ask the master for a new one (ringtmp ring token)"
    return None


def _token_of(ring: RingFile, secret: bytes) -> OpenToken | None:
    digest = _digest(secret)
    return next((token for token in ring.tokens if hmac.compare_digest(token.digest, digest)), None)


def _digest(secret: bytes) -> str:
    return hashlib.sha256(b"ringtmp join " + secret).hexdigest()


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}. Move it away to start over") from error


def _write(path: Path, what: object) -> None:
    write_atomic(path, msgspec.json.encode(what), 0o600)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        for folder in (path.parent.parent, path.parent):  # the mode holds for the last folder of a mkdir only
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = path.with_suffix(".lock").open("a")
    except OSError as error:
        raise UsageError(f"the config directory {path.parent} cannot be written: {error.strerror}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

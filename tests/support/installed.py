"""Packages with strategies of their own, installed for the length of a test: a folder with their files and their metadata."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ringtmp.strategies import registry

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_strategy"


def install(
    folder: Path, package: str, files: Mapping[str, str], offered: Mapping[str, str], version: str = "1.0"
) -> Path:
    """Writes what an installer would: modules, and the metadata that names their entry points."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [f"{name} = {target}\n" for name, target in offered.items()]
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{''.join(lines)}")
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def install_example(folder: Path, version: str = "1.0") -> Path:
    files = {each.name: each.read_text() for each in EXAMPLE.glob("*.py")}
    return install(folder, "ringtmp-local-means", files, {"local-means": "local_means:STRATEGY"}, version)


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """What lies there is found in this process."""
    sys.path.insert(0, str(folder))
    before = set(sys.modules)
    try:
        _look_again()
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(folder) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]
        _look_again()


def _look_again() -> None:
    importlib.invalidate_caches()
    registry.installed.cache_clear()

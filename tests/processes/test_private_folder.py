"""Private folders below TMPDIR: what a killed owner left goes, what a living one has stays, wherever either lives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ringtmp.errors import UsageError
from ringtmp.launch.private_folder import PrivateFolder, remove_leftovers
from ringtmp.runtime.run_directory import RunDirectory

CLEAN = "from ringtmp.launch.private_folder import remove_leftovers; remove_leftovers()"
HOLD = "from ringtmp.launch.private_folder import PrivateFolder; print(PrivateFolder().path, flush=True); input()"


@pytest.fixture(autouse=True)
def own_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_what_a_living_owner_has_stays_and_goes_with_its_end(own_tmpdir: Path) -> None:
    (own_tmpdir / "ringtmp_notes-of-mine.txt").touch()
    owner = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    assert folder.stat().st_mode & 0o777 == 0o700
    mine = PrivateFolder()
    remove_leftovers()
    assert folder.is_dir()
    assert mine.path.is_dir()
    owner.kill()
    owner.communicate()
    remove_leftovers()
    assert not folder.exists()
    mine.remove()
    assert [path.name for path in own_tmpdir.iterdir()] == ["ringtmp_notes-of-mine.txt"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="another PID namespace is made as root")
def test_a_ring_in_another_container_that_shares_tmpdir_leaves_a_living_folder_alone() -> None:
    mine = PrivateFolder()
    (mine.path / "socket").touch()
    subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", CLEAN], check=True)
    assert (mine.path / "socket").exists()
    mine.remove()


def test_a_folder_that_was_cleaned_away_is_made_and_locked_again() -> None:
    mine = PrivateFolder()
    mine.remake()
    shutil.rmtree(mine.path)
    mine.remake()
    remove_leftovers()
    assert mine.path.is_dir()
    assert mine.path.stat().st_mode & 0o777 == 0o700
    mine.remove()
    assert not mine.path.exists()


def test_a_name_that_is_no_text_is_refused_in_a_sentence(own_tmpdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a folder `tmpé` where Python reads names as ASCII (LC_ALL=C with PYTHONUTF8=0)."""
    odd = os.fsdecode(b"t\xc3\xa9".replace(b"\xc3", b"\xff"))
    (own_tmpdir / odd).mkdir()
    with pytest.raises(
        UsageError, match=r"the run directory '.*t\\udcff\\udca9' is not valid UTF-8: if it should be, set PYTHONUTF8=1"
    ):
        RunDirectory(own_tmpdir / odd)
    monkeypatch.setattr(tempfile, "tempdir", str(own_tmpdir / odd))
    with pytest.raises(UsageError, match="TMPDIR .* is not valid UTF-8"):
        PrivateFolder()

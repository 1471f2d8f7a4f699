"""The example of docs/strategies.md, installed as a package and run in real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import here, ringtmp
from installed import EXAMPLE
from test_joining import Ring


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Installed by pip, without a network, into a folder of its own."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(EXAMPLE, folder / "source")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
         "--disable-pip-version-check", "--target", str(folder / "site"), str(folder / "source")],
        check=True, timeout=100,
    )  # fmt: skip
    return dict(os.environ, PYTHONPATH=str(folder / "site"))


@pytest.mark.long
def test_an_installed_strategy_is_listed_trained_with_and_compared(environment: dict[str, str], tmp_path: Path) -> None:
    listed = json.loads(ringtmp("strategies", "--json", cwd=tmp_path, env=environment).stdout)["strategies"]
    assert listed["local-means"]["package"] == "ringtmp-local-means 1.0"
    assert [each["name"] for each in listed["local-means"]["settings"]] == ["tau"]
    words = "train", "--strategy", "local-means:4", "--nodes", 3, "--steps", 40, "--batch-size", 64, "--json", "--quiet"
    summary = json.loads(ringtmp(*words, cwd=tmp_path, env=environment).stdout)
    assert (summary["strategy"], summary["exactness"]) == ("local-means", "replay")
    assert [each["role"] for each in summary["per_node"]] == ["worker"] * 3
    assert summary["loss"]["last"] < summary["loss"]["first"] / 2
    words = "plan", "--nodes", 3, "--compare", "local-means:4,local-means:tau=1", "--json", "--quiet"
    page = json.loads(ringtmp(*words, cwd=tmp_path, env=environment).stdout)
    own, seldom, often = page["ways"]
    assert (own["strategy"], seldom["strategy"], often["strategy"]) == ("ring", "local-means:4", "local-means:1")
    assert 4 * seldom["bytes_total"] == pytest.approx(often["bytes_total"])
    assert 0 < seldom["step_s"] < often["step_s"]
    refused = ringtmp("train", "--strategy", "local-means:0", cwd=tmp_path, code=2, env=environment)
    assert "tau=0 must be at least 1" in refused.stderr
    assert "unknown strategy 'local-means'" in here("train", "--strategy", "local-means", cwd=tmp_path, code=2).stderr


class Equipped(Ring):
    """Only the master and one device have the package."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        super().__init__(folder)
        self._path = environment["PYTHONPATH"]

    def environment(self, name: str) -> dict[str, str]:
        return super().environment(name) | ({"PYTHONPATH": self._path} if name != "bare" else {})


@pytest.mark.long  # in memory in test_every_strategy
def test_a_device_without_the_package_is_left_out_and_one_that_has_it_takes_part(
    environment: dict[str, str], tmp_path: Path
) -> None:
    ring = Equipped(tmp_path, environment)
    try:
        ring.master(3, "--strategy", "local-means:2", "--steps", 4, "--start-with", 2, "--wait", 1)
        ring.device("bare")
        ring.until("master", "bare lacks ringtmp-local-means 1.0, which the strategy comes from: it is left out")
        ring.device("good")
        assert ring.result()["steps"] == 4
    finally:
        ring.close()

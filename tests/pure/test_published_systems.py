"""Every published system of the taxonomies is listed with a setting that train takes, or as not yet there."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringtmp.cli import strategies as shown
from ringtmp.cli import train
from ringtmp.cli.options import flags
from ringtmp.cli.settings import build
from ringtmp.cli.strategies import command
from ringtmp.errors import UsageError
from ringtmp.run.check_settings import resolve
from ringtmp.strategies import published_systems, registry
from ringtmp.strategies.base import Runs, Strategy, drifts

ROOT = Path(__file__).parents[2]
SEEDS = [
    "BigDL",
    "CaffeOnSpark",
    "D-PSGD",
    "DistBelief",
    "EASGD",
    "FireCaffe",
    "GoSGD",
    "MPCA-SGD",
    "MXNet",
    "Petuum",
    "PyTorch",
    "SparkNet",
    "TensorFlow",
    "TreeEASGD",
    "Horovod",
    "Caffe2",
    "DIANNE",
    "MXNet-MPI",
    "STRADS",
    "GADMM",
    "COTS HPC",
    "Parameter Server",
    "Project Adam",
    "Baidu AllReduce",
    "CNTK, 1-bit SGD",
    "CNTK, block momentum",
    "DMTK (Multiverso)",
    "Federated averaging",
    "Gossip learning",
]
GIVEN = [(each.name, how) for each in registry.OURS.values() for how in each.runs]


def test_all_seventeen_systems_of_the_lecture_and_the_surveys_are_listed_once() -> None:
    names = [each.name for each in published_systems.SYSTEMS]
    assert len(published_systems.TAXONOMY) == 17
    assert set(SEEDS) <= set(names)
    assert len(set(names)) == len(names)
    assert all(
        getattr(each, field)
        for each in published_systems.SYSTEMS
        for field in published_systems.System.__struct_fields__
    )


@pytest.mark.parametrize(("strategy", "how"), GIVEN, ids=[f"{name}-{how.system}" for name, how in GIVEN])
def test_every_setting_that_is_given_is_taken_by_train_and_names_its_own_strategy(strategy: str, how: Runs) -> None:
    assert how.system in {each.name for each in published_systems.SYSTEMS}
    words = ["--nodes", "6", "--strategy", *shlex.split(how.options)]
    taken = train.command.make_context("train", words).params
    options = {key: value for key, value in taken.items() if key not in ("config", "listen", "ring_name", "start_with")}
    for key in ("wait_s", "run_dir", "resume", "as_json", "quiet"):
        del options[key]
    config = resolve(build(None, flags(options)))
    assert config.ring.strategy == strategy
    registry.get(strategy).read(config.ring.strategy_settings).check(6, config.training.wire)


def test_a_setting_that_does_not_exist_is_found_out() -> None:
    taken = train.command.make_context("train", ["--strategy", "ps:sync"]).params
    with pytest.raises(UsageError, match="unknown consistency"):
        resolve(build(None, {"strategy": taken["strategy"]}))


class Invented(Strategy):
    name = "invented"
    runs = (Runs("EASGD", "invented:tau=3"), Runs("SparkNet", "invented", lacks="Spark"))


def test_a_strategy_fills_its_row_in_one_line_and_what_it_lacks_is_said() -> None:
    rows = {row.system.name: published_systems.cells(row) for row in published_systems.all_rows([Invented()])}
    assert rows["EASGD"][-1] == "--strategy invented:tau=3"
    assert rows["SparkNet"][-1] == "--strategy invented (not yet: Spark)"
    assert rows["Horovod"][-1] == "not yet"
    assert [row.system.name for row in published_systems.rows_of(Invented())] == ["EASGD", "SparkNet"]


def test_the_table_is_printed_for_people_for_pages_and_for_programs() -> None:
    told = CliRunner().invoke(command, []).stdout
    assert all(system.name.split()[0] in told for system in published_systems.SYSTEMS)
    assert "…" not in told
    assert [how.options for _, how in GIVEN if how.options not in told] == [], "a setting is there to be typed"
    marked = CliRunner().invoke(command, ["--markdown"]).stdout
    assert marked == published_systems.markdown(published_systems.all_rows(registry.every().values()))
    assert marked.count("\n") == len(published_systems.SYSTEMS) + 2
    page = json.loads(CliRunner().invoke(command, ["--json"]).stdout)
    assert set(page) == {"strategies", "systems"}
    fire = next(each for each in page["systems"] if each["name"] == "FireCaffe")
    assert fire["runs"] == [{"command": "ringtmp train --strategy allreduce:tree", "not_yet": None}]
    one = json.loads(CliRunner().invoke(command, ["allreduce", "--json"]).stdout)
    assert list(one["strategies"]) == ["allreduce"]
    assert {each["name"] for each in one["systems"]} == {how.system for how in registry.get("allreduce").runs}
    with pytest.raises(UsageError, match="choose one"):
        CliRunner().invoke(command, ["--markdown", "--json"], standalone_mode=False, catch_exceptions=False)


def test_on_a_narrow_terminal_the_systems_are_a_list_with_every_setting_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is about 160 wide: on 80 columns the terminal broke its lines, and the longest settings were cut off."""
    monkeypatch.setattr(shown, "_terminal_width", lambda: 80)
    told = CliRunner().invoke(command, []).stdout.splitlines()
    assert [line for line in told if len(line) > 80 and not line.startswith("    --strategy ")] == []
    first = told.index("Parameter Server: model + data, central, bounded async., reduce; async.: ad hoc,")
    assert told[first + 1 : first + 3] == ["    distributed PS", "    --strategy ps:ssp:3:servers=2:replicas=1"]
    assert "    --strategy ring --groups auto --sum-tree 4" in told, "both ways of PyTorch"
    assert "    --strategy allreduce:ring" in told
    for width in (180, 200):
        monkeypatch.setattr(shown, "_terminal_width", lambda width=width: width)
        table = CliRunner().invoke(command, []).stdout.splitlines()
        assert "topology" in table[1]
        assert max(map(len, table)) <= width


def test_a_strategy_says_what_its_short_name_sets_and_defaults_as_they_are_typed() -> None:
    told = CliRunner().invoke(command, ["ps"]).stdout
    assert "  short         ps:CONSISTENCY\n" in told
    assert "--with factors=false | true    [false]" in told
    assert "  short         averaging:TAU\n" in CliRunner().invoke(command, ["averaging"]).stdout
    assert "  short " not in CliRunner().invoke(command, ["ring"]).stdout


def test_the_page_says_of_every_strategy_whether_it_drifts() -> None:
    """Workers that trained alone for themselves were "equal to one process up to rounding" in the summary."""
    page = (ROOT / "docs" / "strategies.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `") and line.count(" | ") == 3]
    said = {row[0].strip("| `"): row[3] for row in rows}
    for name, strategy in registry.OURS.items():
        alike = any(word in said[name] for word in ("same bits", "up to rounding")) and "drifts; tau" not in said[name]
        assert drifts(strategy, strategy.read({})) != alike, (name, said[name])
    server = registry.get("ps")
    assert all(drifts(server, server.read(each)) for each in ({"consistency": "async"}, {"quorum": 2}))


def test_the_page_shows_the_table_as_it_is() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import write_systems_table as script
    finally:
        sys.path.pop(0)
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run python scripts/write_systems_table.py"

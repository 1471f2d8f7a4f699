"""A strategy is a value: nothing outside its folder names it, one grammar spells it, and a bad one is refused by name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import ringtmp
from installed import importable, install
from ringtmp.bench.training_runs import strategy_variants as ways
from ringtmp.bench.training_runs.speed_cases import case_named, chosen_cases
from ringtmp.cli.strategies import command
from ringtmp.cli.train import command as train
from ringtmp.config import RingPart, RunConfig
from ringtmp.errors import UsageError
from ringtmp.run.check_settings import resolve
from ringtmp.strategies import registry
from ringtmp.strategies.registry import Choice

ROOT = Path(ringtmp.__file__).parent
#: Files that may have a strategy's name, and what it is there.
ALLOWED = {
    "strategies/registry.py": "the part of the settings called ring",
    "config/keyword_types.py": "the shape of a route",
    "bench/experiments/plan_accuracy.py": "the heading of a column",
    "config/settings.py": "the default strategy; the part of the settings called ring; the shape of a route",
    "metrics/summary.py": "the part of the settings called ring",
    "dashboard/seen_so_far.py": "the part of the settings called ring",
    "run/evaluate_predict_generate.py": "a ring that devices join",
    "plan/route.py": "the shape of a route",
    "plan/planner.py": "the shape of a route",
    "strategies/allreduce/__init__.py": "an algorithm that sums up",
    "strategies/averaging/__init__.py": "an algorithm that sums up",
    "strategies/dpsgd/__init__.py": "a graph",
    "data/gguf_header.py": "what a file holds",
    "model/build_larger_than_memory.py": "an argument of torch.nn.init",
    "model/one_export_for_both_modes.py": "a kind of value",
    "cli/__init__.py": "the verb `ringtmp ring`, which is about members",
    "cli/ring.py": "the verb `ringtmp ring`, which is about members",
    "cli/watch.py": "`--view ring`, which draws any strategy's nodes",
    "launch/authenticate_devices.py": "the name of a domain of keys",
    "launch/agent.py": "the name of a domain of keys",
    "launch/key_store.py": "the ring whose keys they are",
    "report/theme.py": "colours that stay the same from page to page",
    "bench/experiments/energy.py": "the heading of a column",
    "bench/analysis/page_drawings.py": "the heading of a column",
}


def names(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, strategy, constant) wherever a constant is a strategy's name or begins with it and a colon. Docstrings are prose;
    in the bench a list of what is measured, at the top of a module, is data."""
    tree = ast.parse(path.read_text())
    data = path.relative_to(ROOT).parts[0] == "bench"
    for node in tree.body:
        if (
            data
            and isinstance(node, ast.Assign)
            and all(ast.unparse(each).strip("()").isupper() for each in node.targets)
        ):
            continue
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                found = re.match(r"(\w+)(:|$)", each.value)
                if found is not None and found[1] in registry.OURS and " " not in each.value:
                    yield each.lineno, found[1], each.value


def own_folder(path: Path, strategy: str) -> bool:
    return (ROOT / "strategies" / strategy) in path.parents


def test_nothing_outside_a_strategys_folder_names_it() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): (line, value)
        for path in sorted(ROOT.rglob("*.py"))
        for line, strategy, value in names(path)
        if not own_folder(path, strategy)
    }
    assert {name: at for name, at in found.items() if name not in ALLOWED} == {}
    assert set(ALLOWED) - set(found) == set(), "allowed and not needed any more"


# -- one grammar --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("ring", Choice("ring")),
        ("ring:staleness=1", Choice("ring", {}, {"staleness": 1})),
        ("ring:wire=bfloat16", Choice("ring", {}, {"wire": "bfloat16"})),
        ("ps", Choice("ps")),
        ("ps:bsp", Choice("ps", {"consistency": "bsp"})),
        ("ps:ssp:3", Choice("ps", {"consistency": "ssp:3"})),
        ("ps:ssp:inf", Choice("ps", {"consistency": "ssp:inf"})),
        ("ps:bsp:2", Choice("ps", {"consistency": "bsp", "servers": 2})),
        ("ps:ssp:5:2", Choice("ps", {"consistency": "ssp:5", "servers": 2})),
        ("ps:value:0.5", Choice("ps", {"consistency": "value:0.5"})),
        ("ps:asp:0.01:2", Choice("ps", {"consistency": "asp:0.01", "servers": 2})),
        ("ps:async:workers", Choice("ps", {"consistency": "async", "servers": "workers"})),
        ("ps:consistency=ssp:3:servers=2", Choice("ps", {"consistency": "ssp:3", "servers": 2})),
        ("ps:bsp:servers=workers:wire=int8", Choice("ps", {"consistency": "bsp", "servers": "workers"}, {"wire": "int8"})),
        ("allreduce:tree", Choice("allreduce", {"algorithm": "tree"})),
    ],
)  # fmt: skip
def test_a_name_is_read_and_written_in_one_way(text: str, choice: Choice) -> None:
    assert registry.parse(text) == choice
    assert registry.parse(registry.spelled(choice)) == choice


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gossip", "unknown strategy"),
        ("", "unknown strategy"),
        ("pss", "did you mean 'ps'"),
        ("ring:1f1b", "no short form '1f1b': write ring:KEY=VALUE, with a KEY of staleness, wire,"),
        ("ps:sync", "unknown consistency"),
        ("ps:ssp", "at least 0"),
        ("ps:bsp:0", "neither a number of servers"),
        ("ps:bsp:1:2", "unexpected '2' at the end"),
        ("ps:bsp:many", "'many' is neither"),
        ("ps:staleness=1", "unknown setting"),
        ("ps:quorum=two", "quorum=two cannot be: quorum of strategy ps is 1..workers"),
        ("ps:servers=true", "servers=true cannot be: servers of strategy ps is 1..nodes-1 | workers"),
        ("easgd:tau=2.5", "tau=2.5 cannot be: tau of strategy easgd is a whole number, 1 or more"),
        ("ensemble:most", "combine=most cannot be: combine of strategy ensemble is mean | vote | stacking"),
        ("averaging:auto:budget=30", "budget=30 cannot be: budget of strategy averaging is such as 30s or 4MiB"),
        (
            "gosgd:tau=4",
            "'tau': that is a setting of averaging, block-momentum, easgd, mpca; choose from microbatches, p,",
        ),
        ("ps:staleness=3", "'staleness': that is a setting of ring (--staleness); choose from consistency,"),
        ("ps:lr=0.1", "unknown setting of strategy ps 'lr'"),
        ("gosgd:epochs=3", "'epochs': that is a setting of the run: use --epochs"),
        ("averaging:8:tau=9", "averaging:8 and tau=9 contradict each other"),
        ("allreduce:star", "unknown algorithm"),
        ("allreduce:servers=2", "unknown setting"),
        ("ring:=3", "key=value"),
    ],
)
def test_a_name_that_means_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        registry.parse(text)


def test_train_compare_and_every_bench_read_the_same_names() -> None:
    for text in ("ring:staleness=1", "ps:ssp:3:servers=2", "ps:bsp:workers", "allreduce:tree"):
        config = resolve(RunConfig(ring=RingPart(strategy=text, nodes=4)))
        choice, way, case = registry.parse(text), ways.parse(text), case_named(text)
        assert config.ring.strategy == choice.name == way.strategy == case.family
        assert config.ring.strategy_settings == choice.settings == way.settings
        assert config.training.staleness == choice.run.get("staleness", 0) == way.staleness
    assert [case.name for case in chosen_cases("ps:ssp:7,one,ps:b*")] == ["one", "ps:bsp", "ps:bsp:workers", "ps:ssp:7"]
    with pytest.raises(UsageError, match="contradict"):
        resolve(RunConfig(ring=RingPart(strategy="ring:staleness=0:laps=2", laps=3)))
    with pytest.raises(UsageError, match="averaging:8 and --with tau=9 contradict"):
        resolve(RunConfig(ring=RingPart(strategy="averaging:8", strategy_settings={"tau": 9})))


@pytest.mark.parametrize(
    ("text", "nodes", "said"),
    [
        ("ps:bsp:2", 2, "leaves no worker: use servers=1, servers=workers, or --nodes 3 or more"),
        ("ps:bsp:5", 4, "leaves no worker: use servers=1 to 3, servers=workers, or --nodes 6 or more"),
        ("ps:servers=0", 3, "leaves no server: use servers=1 to 2, servers=workers"),
        ("ps:async:teams=4/2", 3, "the number of workers: use --nodes 5 or more"),
        ("ps:bsp:quorum=0", 3, "must be from 1 to 2, the number of workers"),
        ("ps:bsp:replicas=1", 2, "use servers=workers, or servers=2 with --nodes 3 or more"),
        ("ps:bsp:replicas=1", 3, "use servers=workers, or servers=2"),
    ],
)
def test_too_few_nodes_are_told_how_many_it_takes(text: str, nodes: int, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said) + "$"):
        resolve(RunConfig(ring=RingPart(strategy=text, nodes=nodes)))


def test_every_setting_in_a_benchs_name_is_an_option_that_train_has() -> None:
    way = ways.parse("ring:groups=auto:sum_tree=4:microbatches=auto:schedule=zero-bubble")
    known = {option for each in train.params for option in each.opts}
    assert {word for word in way.words() if word.startswith("--")} <= known
    assert way.words()[2:] == ["--groups", "auto", "--sum-tree", "4", "--schedule", "zero-bubble"]
    assert way.microbatches(8, 64, 8) == "auto"
    config = resolve(RunConfig(ring=RingPart(strategy=way.label, nodes=8)))
    assert (config.ring.groups, config.training.sum_tree) == ("auto", 4)


def test_a_strategys_value_loads_no_torch() -> None:
    code = "import sys; from ringtmp.strategies import registry; registry.every(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- strategies of others -----------------------------------------------------------------------------------------------------

BAD = """
from ringtmp.strategies.base import About, Strategy

class Lacking(Strategy):
    name = "lacking"
    about = About("", "", "", "", "", "", "")
    def worker(self, *args): ...

class Whole(Lacking):
    def simulate(self, *args): ...
    def traffic(self, *args): ...

class Loose(Whole):
    Settings = dict

LACKING, WHOLE, LOOSE, DUCK = Lacking(), Whole(), Loose(), object()
"""


def test_what_packages_offer_in_vain_is_named_and_everything_else_works(tmp_path: Path) -> None:
    offered = {
        "ring": "bad:LACKING",
        "lacking": "bad:LACKING",
        "duck": "bad:DUCK",
        "absent": "nowhere:VALUE",
        "other": "bad:LACKING",
    }
    offered |= {"leaving": "leaving:VALUE", "loose": "bad:LOOSE", "alias": "bad:WHOLE", "a_b": "bad:WHOLE"}
    files = {"bad.py": BAD, "leaving.py": "raise SystemExit(3)"}
    folder = install(tmp_path, "bad-strategies", files, offered, "0.3")
    with importable(folder):
        said = {line.split("'")[1]: line for line in registry.problems()}
        assert all("bad-strategies 0.3" in line for line in said.values())
        assert "another strategy of that name" in said["ring"]
        assert "lacks simulate, traffic" in said["lacking"]
        assert "not a ringtmp.strategies.base.Strategy" in said["duck"]
        assert "cannot be imported: ModuleNotFoundError" in said["absent"]
        assert "cannot be imported: SystemExit: 3" in said["leaving"]
        assert "`Settings` no Settings" in said["loose"]
        assert "called 'alias' and it calls itself 'lacking'" in said["alias"]
        assert "not made of" in said["a_b"]
        assert set(registry.every()) == set(registry.OURS)
        assert registry.get("ring") is registry.OURS["ring"]
        with pytest.raises(UsageError, match="'lacking' of bad-strategies 0.3 cannot be used: it lacks"):
            registry.parse("lacking:x=1")
        told = CliRunner().invoke(command, [])
        assert told.exit_code == 0
        assert "lacks simulate" in told.stderr
        assert "Parameter server" in told.stdout
    assert registry.problems() == []

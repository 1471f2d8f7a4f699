"""The measured tables and the figure of docs/strategies.md: every strategy on the same emulated devices, in turns.

    python scripts/measure_strategies.py --rates          learning rates alone, on local processes; needs no quiet machine
    sudo python scripts/measure_strategies.py             the rates that are missing, then all strategies; writes the page
    python scripts/measure_strategies.py --write          writes the page again, from what is kept beside it
    python scripts/measure_strategies.py --quick --out F  small, on plain processes, without the page: does everything work?

Four emulated devices of 0.45 core behind 100 Mbit/s, the bundled digits. Measurements are files in --out, and the same command
goes on where it was ended. test_strategies_measured.py checks that the page is current and that no strategy is missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from ringtmp.bench import jobs_of_experiments
from ringtmp.bench.bench_request import Choices
from ringtmp.bench.experiments.exchange import Row, figure
from ringtmp.bench.experiments.learning_progress import Outcome
from ringtmp.bench.measuring import machine_facts, measure_jobs, progress_bar
from ringtmp.bench.measuring.measurement_files import Store
from ringtmp.bench.training_runs import strategy_variants
from ringtmp.launch.device_facts import usable_cores
from ringtmp.report import figures
from ringtmp.units import bytes_text, joules_text, seconds_text

DOCS = Path(__file__).parent.parent / "docs"
PAGE, KEPT, FIGURE = DOCS / "strategies.md", DOCS / "strategies.json", DOCS / "strategies.svg"
BEGIN, END = "<!-- made by scripts/measure_strategies.py -->\n", "<!-- end of what was measured -->\n"
EXPERIMENTS = ("progress", "traffic", "exchange")
#: Every strategy, and of some the ways in which they differ.
WAYS = (
    "ring", "ring:staleness=1",
    "ps:bsp", "ps:bsp:workers", "ps:bsp:factors=true", "ps:asp:0.01", "ps:value:0.01", "ps:ssp:3", "ps:ssp:3:eager=true",
    "ps:async", "ps:async:n_push=2:n_fetch=2",
    "allreduce:ring", "allreduce:tree", "allreduce:halving", "allreduce:ring:wire=1bit", "hybcomm", "tensor",
    "averaging:8", "block-momentum:8:momentum=0.5", "easgd:4", "tree-easgd:4", "dpsgd", "gosgd:0.25", "mpca:8",
    "gossip-learning", "ensemble:stacking", "lbfgs", "gadmm:0.05:passes=10", "scheduled:6000:independence=1:rate=0.02",
)  # fmt: skip
#: One of each pattern, for the figure.
DRAWN = (
    "ps:bsp", "ps:bsp:workers", "ps:async", "allreduce:tree", "allreduce:ring", "allreduce:halving", "dpsgd",
    "gossip-learning", "easgd:4", "averaging:8",
)  # fmt: skip
LIMIT_S = 600.0


class Kept(msgspec.Struct, frozen=True):
    """What a measurement of all strategies left, beside the page."""

    command: str
    date: str
    facts: tuple[tuple[str, str], ...]
    target_loss: float
    outcomes: tuple[Outcome, ...]
    rows: tuple[Row, ...]
    skipped: tuple[tuple[str, str], ...]


def words(ways: str, out: Path, quick: bool) -> list[str]:
    small = ["--quick", "--no-isolation"] * quick
    return ["bench", *EXPERIMENTS, "--strategies", ways, "--repeats", "1", *small, "--out", str(out)]


def sweep(ways: str, out: Path) -> None:
    """Every rate of every way that has a sweep of its own; what is there is not measured again."""
    choices = Choices(EXPERIMENTS, strategy_variants.parse_all(ways), (), True, 1, 0, False, usable_cores())
    plan, store = jobs_of_experiments.sweep_plan(choices), Store(out)
    with progress_bar.telling(plan, quiet=False) as teller:
        for _ in measure_jobs.perform(plan, store, machine_facts.look(), LIMIT_S, teller):
            pass
    store.close()


def read(out: Path, command: str) -> Kept:
    found: dict[str, Any] = msgspec.json.decode((out / "results.json").read_bytes())
    page, progress = found["page"], found["progress"]
    left = [(each["what"], each["why"]) for section in page["sections"][:-1] for each in section["skipped"]]
    facts = [tuple(each) for each in page["facts"] if each[0] not in ("command", "date", "strategies")]
    kept = {
        "command": command, "date": date.today().isoformat(), "facts": facts, "target_loss": progress["target_loss"],
        "outcomes": progress["outcomes"], "rows": found["exchange"]["rows"], "skipped": list(dict.fromkeys(left)),
    }  # fmt: skip
    return msgspec.convert(kept, Kept)


# -- the page -----------------------------------------------------------------------------------------------------------


def tables(kept: Kept) -> str:
    failed = _failed(kept)
    made = [
        f"`{kept.command}`, {kept.date}. " + "; ".join(f"{what}: {value}" for what, value in kept.facts) + ".",
        "",
        f"The target is a training loss of {kept.target_loss:.3f}. Joules are modelled.",
        "",
        *table(
            "strategy", "learning rate", "accuracy", "a step", "bytes a step", "joules a step", "to the target: steps", "time",
            "bytes", "joules", rows=[_outcome(each) for each in kept.outcomes],
        ),
        *(("", f"Not in the table: {failed}.") if failed else ()),
        "",
        "One exchange of the model, per step: models through the fullest direction of any link, and seconds.",
        "",
        *table(
            "strategy", "exchange", "lower bound", "from", "models: at least", "measured", "the link alone", "bound",
            "measured step", rows=[_bound(each) for each in kept.rows],
        ),
        "",
    ]  # fmt: skip
    return "\n".join(made) + "\n"


def _failed(kept: Kept) -> str:
    """Each way once, with the words it ended with."""
    found = [(what.partition(",")[0], why) for what, why in kept.skipped if why.startswith("failed")]
    return "; ".join(f"`{what}` {why}" for what, why in found)


def table(*columns: str, rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(each)} |" for each in [columns, ("---",) * len(columns), *rows]]


def _outcome(each: Outcome) -> tuple[str, ...]:
    whole, target = each.whole, each.to_target
    name = f"`{each.label}`" + (f", batch {each.batch_size}" if each.lr is None else "")
    costs = ("never", "", "", "") if target is None else (
        f"{target.steps:.0f}", seconds_text(target.seconds), bytes_text(target.bytes), joules_text(target.joules),
    )  # fmt: skip
    return (
        name.replace("`one device`", "one device"),
        f"{each.lr:g}" if each.lr is not None else "none",
        f"{each.accuracy:.1%}" if each.accuracy is not None else "",
        seconds_text(each.step_s),
        bytes_text(each.step_bytes),
        joules_text(whole.joules / whole.steps),
        *costs,
    )


def _bound(each: Row) -> tuple[str, ...]:
    link, bound = ("" if one is None else seconds_text(one) for one in (each.floor_s, each.in_turn_s))
    return (
        f"`{each.label}`", each.pattern, each.formula, each.source, f"{each.least_models:.3g}", f"{each.models:.3g}", link,
        bound, seconds_text(each.step_s),
    )  # fmt: skip


def page(text: str, kept: Kept) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + tables(kept) + END + after


def drawn(kept: Kept) -> str:
    chosen = [each for label in DRAWN for each in kept.rows if each.label == label]
    return figures.draw(figure(chosen)).narrow


def write(kept: Kept) -> None:
    PAGE.write_text(page(PAGE.read_text(), kept))
    FIGURE.write_text(drawn(kept))


def measure(ways: str, out: Path, quick: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ringtmp", *words(ways, out, quick), "--quiet"],
        stdout=2,  # its tables; ours are printed here
    )
    if done.returncode:
        sys.exit(done.returncode)
    kept = read(out, "python scripts/measure_strategies.py" + " --quick" * quick)
    if quick:
        print(tables(kept))
    else:
        KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
        write(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", default=",".join(WAYS))
    parser.add_argument("--out", type=Path, default=Path("runs/strategies"))
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        write(msgspec.json.decode(KEPT.read_bytes(), type=Kept))
    elif arguments.rates:
        sweep(arguments.strategies, arguments.out)
    else:
        measure(arguments.strategies, arguments.out, arguments.quick)


if __name__ == "__main__":
    main()

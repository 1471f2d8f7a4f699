"""Reports: known events give exactly their numbers back, and the page is whole in a real browser."""

from __future__ import annotations

import csv
import math
import re
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from browser import Browser, chromium, legible
from known_run import figures_of, known_events, node_step, step
from ringtmp.cli.report import command
from ringtmp.errors import UsageError
from ringtmp.metrics.event_log import EventLog
from ringtmp.metrics.events import (
    Evaluated,
    Event,
    NodeStarted,
    NodeStep,
    Regrouped,
    StepDone,
)
from ringtmp.report import learning_curves, page_content, run_page, run_timeline
from ringtmp.report.figures import draw
from ringtmp.report.page import write
from ringtmp.report.page_content import Figure, Mark, Page, Section, Series, Skipped, Table, Verdict
from ringtmp.report.svg import MOST_POINTS, thinned
from ringtmp.report.theme import COLOURS, series_colours, short
from test_training_loop import resume, train

# -- what is measured is what is shown ----------------------------------------------------------------------------------


def test_known_idle_bytes_and_joules_come_back_exactly() -> None:
    shown = figures_of(known_events())
    idle = {series.name: dict(zip(series.x, series.y, strict=True)) for series in shown["idle"].series}
    assert idle == {"activations": {"master": 0.0, "node 1": 37.5}, "gradients": {"master": 25.0, "node 1": 12.5}}
    busy = {series.name: dict(zip(series.x, series.y, strict=True)) for series in shown["busy"].series}
    assert busy["forward"] == pytest.approx({"master": 75.0, "node 1": 30.0})
    assert [(each.name, each.y) for each in shown["bytes"].series] == [
        ("sent", (3000, 1500)),
        ("received", (1500, 3000)),
    ]
    links = {row.name: dict(zip(row.x, row.y, strict=True)) for row in shown["links"].series}
    assert (links["master"]["node 1"], links["node 1"]["master"]) == (3100, 1600)
    assert math.isnan(links["master"]["master"])
    training, test = shown["loss-bytes"].series
    assert (training.x, training.y) == ((1500.0, 3000.0, 4500.0), (3.0, 2.0, 1.0))
    assert (test.x, test.y) == ((4500.0,), (0.5,))
    assert shown["loss-seconds"].series[0].x == (2.0, 4.0, 6.0)
    # A step: 2 W x 2 s + 4 W x (1.5 or 1) s x 0.5 + 1e6 nJ x 1500 bytes.
    a_step = (4.0 + 3.0 + 1.5) + (4.0 + 2.0 + 1.5)
    assert shown["loss-joules"].series[0].x == pytest.approx((a_step, 2 * a_step, 3 * a_step))
    assert "modelled" in shown["loss-joules"].x_label
    parts = {series.name: series.y for series in shown["energy"].series}
    assert parts == {"being on": (12.0, 12.0), "working": (9.0, 6.0), "bytes": pytest.approx((4.5, 4.5))}
    assert shown["memory"].series[0].y == (300.0, 300.0)


def test_joules_of_a_meter_are_shown_as_measured_step_by_step() -> None:
    read = iter([5.0, 7.0, 6.0])
    events = [
        msgspec.structs.replace(each, joules=next(read))
        if isinstance(each, NodeStep) and each.node == 1 else each
        for each in known_events()
    ]  # fmt: skip
    found = run_timeline.gather(events, "run")
    assert found is not None
    assert [(each.energy_source, each.energy_j) for each in found.summary.per_node] == [
        ("modelled", pytest.approx(25.5)), ("measured", 18.0),
    ]  # fmt: skip
    assert learning_curves.joules_by_step(found) == pytest.approx([8.5 + 5, 8.5 + 7, 8.5 + 6])


def test_what_is_done_again_after_a_loss_counts_once_and_shows_in_the_speed() -> None:
    events = known_events()
    again: list[Event] = [NodeStarted(16.0, node, "worker", 1, 2, ("0-1",), 10) for node in (0, 1)]
    again.append(Regrouped(16.0, 1, 2, "node 1 was lost", 2, 3.0, (1,), 1.0, 2, "snapshot"))
    for number in (1, 2):
        at = 16.0 + 2 * (number - 1)
        again += [node_step(0, number, at), node_step(1, number, at), step(number, at + 2)]
    place = next(index for index, each in enumerate(events) if isinstance(each, Evaluated))
    shown = figures_of([*events[:place], *again, *events[place + 1 :]])
    assert shown["loss-bytes"].series[0].x == (1500.0, 3000.0, 4500.0)
    assert shown["loss-seconds"].series[0].x == (2.0, 18.0, 20.0)
    speed = shown["speed"]
    assert speed.marks == (Mark(16.0, "node 1 lost, healed in 3.0 s"),)
    (samples,) = speed.series
    stretch = 2 * samples.x[0]
    assert sum(samples.y) * stretch == pytest.approx(5 * 16)  # three steps, two of them twice
    assert min(samples.y) == 0  # while it healed


def test_the_step_that_is_drawn_is_the_median_one_without_the_first() -> None:
    events = known_events()
    walls = {0: 9.0, 1: 2.0, 2: 1.0}
    events = [step(each.step, each.at, walls[each.step]) if isinstance(each, StepDone) else each for each in events]
    found = run_timeline.gather(events, "run")
    assert found is not None
    drawn = run_page.median_step(found)
    assert drawn is not None
    number, spans = drawn
    assert number == 2
    assert spans == (page_content.Span("master", "forward", 0.0, 1.0), page_content.Span("node 1", "forward", 0.0, 1.0))


def test_a_run_that_was_cut_short_has_a_page_too() -> None:
    for length in range(1, len(known_events())):
        found = run_timeline.gather(known_events()[:length], "run")
        assert found is not None
        assert run_page.page(found).facts[0] == ("outcome", "unfinished")
    assert run_timeline.gather([], "run") is None


# -- drawing ------------------------------------------------------------------------------------------------------------


def every_kind() -> tuple[Figure, ...]:
    x, names, three = (1.0, 10.0, 100.0), ("ring", "ps:bsp", "allreduce:ring"), (3.0, 2.0, 1.0)
    band = (Series("ring", x, three, (2.5, 1.5, 0.5), (3.5, 2.5, 1.5)), Series("ideal", x, three))
    gap = Series("a", names, (3.0, 2.0, float("nan")))
    cells = (Series("a", ("x", "y"), (1e6, 0.0)), Series("b", ("x", "y"), (5.0, float("nan"))))
    sizes, ratios = tuple(str(2**each) for each in range(11)), tuple(2.0 ** (each - 5) for each in range(11))
    spans = (page_content.Span("master", "forward", 1.0, 1.5), page_content.Span("node 1", "backward", 1.5, 2.0))
    lost = (Mark(10.0, "lost"),)
    return (
        Figure("lines", "Lines", "lines", "s", "loss", band, log_x=True, marks=lost, line=2.0, line_label="aim"),
        Figure("bars", "Bars", "bars", "", "J", (gap, Series("b", names, three)), line=4.0, line_label="cap"),
        Figure(
            "stacked", "Stacked", "stacked", "", "%", (Series("busy", names, three), Series("window", names, three))
        ),
        Figure("heat", "Heat", "heat", "to", "from", cells),
        Figure("map", "Map", "map", "batch", "net", tuple(Series(row, sizes, ratios) for row in "ab")),
        Figure("gantt", "Gantt", "gantt", spans=spans),
    )


def whole_page() -> Page:
    return Page(
        "Ring <b>&", "sub", (("command", "x" * 90), ("machine", "two cores")), True,
        (
            Section(
                "first", "First", "One.\n\nTwo.",
                (Verdict("Idle less?", "It idles less.", "yes", "31 %"), Verdict("Energy?", "More.", "no"),
                 Verdict("Scale?", "Both.", "mixed", "x"), Verdict("Hold?", "Unknown.", "open")),
                every_kind(),
                (Table("T", ("node", "idle"), (("master", "3 %"),), "note"), Table("None", ("a",), ()),
                 Table("Long", ("a", "b"), tuple((str(row), "words " * 12) for row in range(20)))),
                (Skipped("ps", "needs root"),),
            ),
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of every kind, written once."""
    return write(whole_page(), tmp_path_factory.mktemp("every"))


@pytest.mark.long
def test_every_kind_of_figure_becomes_files_and_the_numbers_come_back(written: Path) -> None:
    folder = written.parent
    for figure in every_kind():
        light = (folder / f"figures/{figure.name}.svg").read_text()
        dark = (folder / f"figures/{figure.name}-dark.svg").read_text()
        assert COLOURS["muted"][0] in light
        assert COLOURS["muted"][1] in dark
        assert not any(pair[0] in dark for pair in COLOURS.values())
        assert (folder / f"figures/{figure.name}.png").stat().st_size > 2000
    with (folder / "data/lines.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["series", "s", "loss", "low", "high"]
    assert [tuple(map(float, row[1:])) for row in rows[:3]] == [(1, 3, 2.5, 3.5), (10, 2, 1.5, 2.5), (100, 1, 0.5, 1.5)]
    assert (folder / "data/table-first-1.csv").read_text() == "node,idle\nmaster,3 %\n"


def test_the_page_is_one_file_without_scripts_addresses_or_unescaped_text(written: Path) -> None:
    text = written.read_text()
    assert "Ring &lt;b&gt;&amp;" in text
    assert "<script" not in text
    addresses = set(re.findall(r'(?:src|href|url)[=(]"?([^")> ]+)', text))
    assert all(each.startswith(("#", "data:")) for each in addresses)
    assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert text.index('id="verdicts"') < text.index('id="first"') < text.index('id="facts"')
    assert "Nothing was measured." in text
    assert "<summary>20 rows</summary>" in text
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names)), "a name is there twice"
    bars = every_kind()[1]
    assert draw(bars) == draw(bars), "the same figure twice differs"


def test_figures_that_would_overwrite_each_other_or_do_not_add_up_are_refused(tmp_path: Path) -> None:
    def page(*figures: Figure) -> Page:
        return Page("t", "s", (), False, (Section("a", "A", figures=figures),))

    good = Figure("one", "One", "bars", series=(Series("a", ("x",), (1.0,)),))
    with pytest.raises(UsageError, match="two figures are called 'one'"):
        write(page(good, good), tmp_path)
    with pytest.raises(UsageError, match="'../up'"):
        write(page(Figure("../up", "Up", "bars")), tmp_path)
    with pytest.raises(UsageError, match="differ in length"):
        write(page(Figure("two", "Two", "bars", series=(Series("a", ("x",), (1.0, 2.0)),))), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_long_line_is_thinned_but_no_peak_is_lost() -> None:
    y = [1.0] * 50_000
    y[31_234], y[777] = 9.0, -3.0
    points = thinned(Series("a", tuple(map(float, range(len(y)))), tuple(y)))
    assert len(points) <= MOST_POINTS + 2
    assert {(31_234.0, 9.0), (777.0, -3.0), (0.0, 1.0), (49_999.0, 1.0)} <= set(points)


def test_a_name_has_its_colour_in_every_figure_and_no_two_of_one_figure_share_one() -> None:
    assert series_colours(["ps:bsp", "ring"]) == series_colours(["ring", "ps:bsp"])[::-1]
    many = series_colours(["ring", "ring:staleness=1", "ps:bsp", "ps:async", "allreduce:ring", "a", "b", "c"])
    assert len(set(many)) == len(many)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.01234, "0.0123"),
        (999.6, "1000"),
        (1234.0, "1234"),
        (12_500.0, "12.5k"),
        (3.2e6, "3.2M"),
        (-2e9, "-2G"),
    ],
)
def test_numbers_in_figures_are_short(value: float, text: str) -> None:
    assert short(value) in (text, text.replace("1000", "1e+03"))


# -- the verb -----------------------------------------------------------------------------------------------------------


def test_without_matplotlib_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'ringtmp\[plots\]'"):
        CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False, standalone_mode=False)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run directory"):
        CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False, standalone_mode=False)
    EventLog(tmp_path / "events.jsonl").close()
    with pytest.raises(UsageError, match="was never started"):
        CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False, standalone_mode=False)


# -- in a real browser --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(chromium() is None, reason="there is no chromium here (Debian: apt-get install chromium)")
def test_a_real_runs_report_is_whole_and_legible_in_a_browser_and_on_a_phone(
    tmp_path: Path, written: Path, request: pytest.FixtureRequest
) -> None:
    train(tmp_path / "run", 3, steps=4)
    resume(tmp_path / "run", 2, steps=6)
    CliRunner().invoke(command, [str(tmp_path / "run")], catch_exceptions=False, standalone_mode=False)
    path = tmp_path / "run/report/report.html"
    assert request.config.cache is not None
    shots = request.config.cache.mkdir("screenshots")
    of_a_run = {f"loss-{axis}" for axis in ("steps", "seconds", "bytes", "joules")}
    of_a_run |= {"accuracy", "idle", "busy", "gantt", "speed", "energy", "links", "bytes", "memory"}
    expected = {path: of_a_run, written: {figure.name for figure in every_kind()}}
    with Browser(tmp_path / "browser") as browser:
        for page, names in expected.items():
            for width, dark in ((1280, False), (390, True)) if page == path else ((390, False),):
                assert legible(browser, page, width, dark) == names
                name = "run" if page == path else "every-kind"
                browser.screenshot(shots / f"{name}-{width}-{'dark' if dark else 'light'}.png")
        assert browser.problems == []

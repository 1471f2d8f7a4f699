"""The measured part of docs/strategies.md: no strategy is missing, and the page says what is kept beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from invented import choices, invented
from invented import page as page_of
from ringtmp.bench import jobs_of_experiments
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.training_runs.strategy_variants import parse, parse_all
from ringtmp.strategies import registry

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import measure_strategies

        yield measure_strategies
    finally:
        sys.path.pop(0)


def test_every_strategy_is_measured_and_can_be_on_four_devices(script: ModuleType) -> None:
    ways = parse_all(",".join(script.WAYS))
    assert {way.strategy for way in ways} == set(registry.OURS)
    assert [way.refusal(4, layers=9) for way in ways] == [None] * len(ways)
    drawn = [parse(label).exchange(4) for label in script.DRAWN]
    assert set(script.DRAWN) <= set(script.WAYS)
    assert all(drawn)
    assert len({each.pattern for each in drawn}) == len(drawn)


def test_what_was_measured_becomes_the_page_and_the_figure(script: ModuleType, tmp_path: Path) -> None:
    asked = choices(quick=False, strategies="ps:bsp,lbfgs,allreduce:tree", names=script.EXPERIMENTS)
    measured = invented(asked)
    results = jobs_of_experiments.results(asked, Measured(measured)) | {"page": page_of(asked, measured)}
    (tmp_path / "results.json").write_bytes(msgspec.json.encode(results))
    kept = script.read(tmp_path, "the command")
    text = script.page(f"before\n{script.BEGIN}old\n{script.END}after\n", kept)
    assert text.startswith(f"before\n{script.BEGIN}`the command`, ")
    assert text.endswith(f"{script.END}after\n")
    assert "old" not in text
    assert "| `ps:bsp` | 0.002 | 90.0% | 1.0 s | 2.0 KiB | 12 J |" in text
    assert "| `lbfgs`, batch 1438 | none | 90.0% |" in text
    assert (
        "| `allreduce:tree` | binomial tree | 2 ceil(log2(n+1)) T + ceil(log2 n) R + U | Langer et al. 2020 | 2 |"
        in text
    )
    assert script.page(text, kept) == text
    picture = script.drawn(kept)
    assert picture.startswith("<?xml")
    assert "allreduce:tree" in picture
    assert "lbfgs" not in picture


def test_the_page_is_what_is_kept(script: ModuleType) -> None:
    text = script.PAGE.read_text()
    assert (text.count(script.BEGIN), text.count(script.END)) == (1, 1)
    if script.KEPT.exists():  # measured on a machine that could
        kept = msgspec.json.decode(script.KEPT.read_bytes(), type=script.Kept)
        assert script.page(text, kept) == text, "run python scripts/measure_strategies.py --write"
        assert all(f"`{what.partition(',')[0]}` {why}" in text for what, why in kept.skipped if "failed" in why)
        assert {each.label for each in kept.outcomes} | {what.partition(",")[0] for what, _ in kept.skipped} >= set(
            script.WAYS
        )


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_it_measures_in_small_without_a_lab(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.measure("allreduce:tree,mpca:2,lbfgs", tmp_path / "out", quick=True)
    told = capsys.readouterr().out
    assert "| `allreduce:tree` | binomial tree |" in told
    assert "| `mpca:2` |" in told
    assert "| `lbfgs`, batch 1438 | none |" in told

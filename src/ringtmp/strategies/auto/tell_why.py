"""A choice in one line for people: what was chosen, what the others would take, what is given up."""

from __future__ import annotations

from ringtmp.errors import DoesNotFit
from ringtmp.plan.objective import Objective, cost_text
from ringtmp.strategies.auto.choose import Choice, Way, best_of

#: A way that needs leave is spoken of where it would save this share.
WORTH_SAYING = 0.15
#: Others that are named.
MOST_OTHERS = 3


def why(choice: Choice, objective: Objective) -> str:
    """'auto: allreduce:halving on 4 devices, about 310 ms a step: it sends 1.8 MiB of gradients, ring would send 9.0 MiB each
    way over a cut (ring 1.1 s, desk alone 900 ms); inputs and labels leave the master'"""
    best = choice.best
    cost = cost_text(objective, best.cost)
    line = f"auto: {_named(best)}, about {cost} a step{_what_travels(choice)}"
    others = _others(choice, objective)
    line += f" ({', '.join(others)})" if others else ""
    line += "".join(f"; {each}" for each in best.gives_up)
    return line + _with_leave(choice, objective)


def _named(way: Way) -> str:
    if way.made is None or way.alone:
        return way.label
    if way.devices == 1:
        return f"{way.made.step.nodes[0].device} alone"
    shape = f" ({way.made.shape})" if way.made.shape else ""
    return f"{way.label} on {way.devices} devices{shape}"


def _what_travels(choice: Choice) -> str:
    """Beside the best way that splits the work otherwise."""
    best = choice.best
    split = best.strategy.splits_layers
    rivals = [each for each in choice.ways if each.carried and not each.alone and each.strategy.splits_layers != split]
    if best.devices < 2 or not rivals:
        return ""
    rival = min(rivals, key=lambda each: each.cost)
    return f": it sends {best.carried}, {rival.label} would send {rival.carried}"


def _others(choice: Choice, objective: Objective) -> list[str]:
    """The best of every other kind that had leave, the fastest first; those too large for the memory behind them."""
    seen = {_kind(choice.best)}
    found: list[str] = []
    large: list[str] = []
    for each in sorted(choice.ways, key=lambda each: each.cost):
        if each.needs or _kind(each) in seen:
            continue
        if each.fits:
            seen.add(_kind(each))
            found.append(f"{each.label} {cost_text(objective, each.cost)}")
        elif isinstance(each.problem, DoesNotFit):
            seen.add(_kind(each))
            large.append(f"{each.label} does not fit")
    return [*found, *large][:MOST_OTHERS]


def _kind(way: Way) -> str:
    """Two ways of one kind are not both worth a word. A ring that leaves everyone else out is the master alone."""
    return "alone" if way.alone or way.devices == 1 else way.strategy.name


def _with_leave(choice: Choice, objective: Objective) -> str:
    others = [each for each in choice.ways if each.fits and each.needs]
    if not others or (best := best_of(others)).cost > choice.best.cost * (1 - WORTH_SAYING):
        return ""
    return (
        f"; with {' and '.join(best.needs)} {best.label} would take about {cost_text(objective, best.cost)}, but "
        f"{' and '.join(best.gives_up)}"
    )

"""AdaComm: how many steps workers make between two means, chosen anew every time a budget of seconds or bytes is spent.

J. Wang, G. Joshi, Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update SGD, 2019.

    tau <- tau_0
    whenever T_0 has passed since tau was chosen, at a mean:
      next <- ceil(sqrt(F / F_0) tau_0)
      tau <- next if next < tau, otherwise ceil(gamma tau)

    symbol    here
    tau_0     the setting first
    T_0       the setting budget: seconds, or bytes that all nodes have sent together
    F         the mean training loss of the round that ends, over all workers
    F_0       the mean training loss of the first step
    gamma     1/2

So means are rare while there is much to learn, and as frequent in the end as all-reduce has them.

Departures. T_0 may be bytes, which makes every choice, and with it the run, repeatable. Seconds are the mean of what the
workers' clocks say, so that all choose the same. The paper's variant for learning rates that fall is left out. A resumed run,
and one that has lost a worker, begins with tau_0 and an F_0 of its own. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import msgspec

from ringtmp.errors import UsageError

GAMMA = 0.5
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES = {"KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3}


class Budget(msgspec.Struct, frozen=True):
    amount: float
    in_bytes: bool


def read_budget(text: str) -> Budget:
    """`30s` and `4MiB` as values."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+)", text)
    unit = found[2] if found else ""
    size = {**_SECONDS, **_BYTES}.get(unit)
    if found is None or size is None or not float(found[1]):
        raise UsageError(
            f"budget={text or 'nothing'}: tau=auto needs a number above 0 with s, min, h, KiB, MiB or GiB, such as budget=30s "
            "or budget=4MiB"
        )
    return Budget(float(found[1]) * size, unit in _BYTES)


def next_tau(tau: int, first: int, loss: float, first_loss: float) -> int:
    sound = 0 < first_loss < math.inf and math.isfinite(loss)  # else the run ends, with a word on it
    wanted = math.ceil(math.sqrt(max(loss, 0.0) / first_loss) * first) if sound else tau
    return max(1, wanted if wanted < tau else math.ceil(GAMMA * tau))


class AdaptiveTau:
    """Of one worker; all choose the same, because all are told the same."""

    tells = 3  # the loss of a round's first step, the mean of all its steps, seconds since tau was chosen

    def __init__(self, first: int, budget: Budget, round_bytes: float, step: int, clock: Callable[[], float]) -> None:
        """`round_bytes`: that all nodes send for one mean; `step`: with which the first round begins."""
        self.tau = first
        self._first = first
        self._budget = budget
        self._round_bytes = round_bytes
        self._begun = step
        self._clock = clock
        self._chosen_at = clock()
        self._sent_bytes = 0.0  # since tau was chosen
        self._first_loss: float | None = None
        self._losses: list[float] = []

    def ends(self, step: int) -> bool:
        return step + 1 - self._begun >= self.tau

    def loss(self, value: float) -> None:
        self._losses.append(value)

    def tell(self) -> list[float]:
        losses = self._losses or [0.0]
        return [losses[0], sum(losses) / len(losses), self._clock() - self._chosen_at]

    def begun(self, step: int, told: Sequence[Sequence[float]]) -> None:
        self._begun = step
        self._losses = []
        first, loss, seconds = (sum(column) / len(told) for column in zip(*told, strict=True))
        self._first_loss = first if self._first_loss is None else self._first_loss
        self._sent_bytes += self._round_bytes
        if (self._sent_bytes if self._budget.in_bytes else seconds) < self._budget.amount:
            return
        self.tau = next_tau(self.tau, self._first, loss, self._first_loss)
        self._sent_bytes, self._chosen_at = 0.0, self._clock()

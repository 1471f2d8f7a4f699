"""An epoch that ends when enough of its samples have been worked through, before the slowest worker is done with its share.

Project Adam (Chilimbi et al. 2014, 3.2) ends an epoch when 75 % of the data are done. Pure.
"""

from __future__ import annotations


class Stretch:
    """Steps from one pause of the run to the next; shares are parts of a batch."""

    def __init__(self, enough: float) -> None:
        """`enough`: the part of all samples at which the rest may be given up; 1: none is."""
        self._enough = enough
        self._dealt = 0.0
        self._done = 0.0
        self._over = False

    def dealt(self, share: float, fresh: bool) -> None:
        """`fresh`: the first step after a pause."""
        if fresh:
            self._dealt, self._done, self._over = 0.0, 0.0, False
        self._dealt += share

    def done(self, share: float) -> None:
        self._done += share

    def may_end(self) -> bool:
        """Once: all of the stretch has been dealt out, and enough of it is done."""
        if self._enough >= 1 or self._over or self._done < self._enough * self._dealt - 1e-9:
            return False
        self._over = True
        return True

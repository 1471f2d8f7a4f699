"""Every error RingTMP raises on purpose, with the exit code the command line gives it.

RingError                     1
  UsageError                  2   wrong input; nothing was started
  DoesNotFit                  3   the model does not fit the devices
  NodeLost                    4   a node is gone for good
    LinkLost                  4   two nodes are there and cannot reach each other
  NodeFailed                  1   a node raised; its traceback is part of the message
  LossNotFinite               1
  ProtocolError               1   received bytes that no honest peer of this version sends
    Misconduct                1   and which node sent them
    Unasked                   1   or an answer that fits no question
  CheckpointError             1   no readable checkpoint
  SnapshotUnusable            1   a layer of it is missing or damaged; healing then goes back to the checkpoint
  WaitTimeout                 1   a wait came to its limit; says for whom and in which step
  Interrupted               130   stopped by the user, checkpoint saved
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar


class RingError(Exception):
    exit_code: ClassVar[int] = 1


class UsageError(RingError):
    exit_code = 2


class DoesNotFit(RingError):  # noqa: N818
    exit_code = 3


class NodeLost(RingError):  # noqa: N818
    exit_code = 4

    def __init__(self, text: str, node: int | None = None, notice_s: float = 0.0) -> None:
        """`notice_s`: since it was last known to live, so at most this long after it was lost."""
        super().__init__(text)
        self.node = node
        self.notice_s = notice_s


class LinkLost(NodeLost):
    def __init__(self, text: str, first: int, second: int) -> None:
        super().__init__(text, first)
        self.pair = frozenset((first, second))


class NodeFailed(RingError):  # noqa: N818
    pass


class LossNotFinite(RingError):  # noqa: N818
    pass


class ProtocolError(RingError):
    pass


class Misconduct(ProtocolError):  # noqa: N818
    def __init__(self, text: str, node: int) -> None:
        super().__init__(text)
        self.node = node


class Unasked(ProtocolError):  # noqa: N818
    """An answer that fits no question: of the two that spoke with each other one did so wrongly."""

    def __init__(self, key: int, step: int) -> None:
        super().__init__(f"sent key {key} for step {step}, which nobody asked for")


class CheckpointError(RingError):
    pass


class SnapshotUnusable(RingError):  # noqa: N818
    pass


class WaitTimeout(RingError):  # noqa: N818
    pass


class Interrupted(RingError):  # noqa: N818
    exit_code = 130


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not in a list, with the nearest one that is."""
    choices = sorted(known)
    near = nearest(name, choices)
    hint = f"did you mean {near!r}? " if near else ""
    return UsageError(f"unknown {kind} {name!r}: {hint}choose from {', '.join(choices)}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; upper and lower case are alike."""
    folded = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    return folded[near[0]] if near else None


def some_of(names: Sequence[str], most: int = 8) -> str:
    """The first few, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def told_as_usage(said: str) -> Iterator[None]:
    """Whatever another library raises while it reads a user's file. `said`: the option and the file, as the user wrote them.
    Our own errors say it better and pass; so does a lack of memory, which is no fault of the file."""
    try:
        yield
    except (RingError, MemoryError):
        raise
    except Exception as error:  # the libraries have many kinds
        raise UsageError(f"{said} cannot be read: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Its first line, and what follows if that ends in a colon."""
    reason = ""
    for line in str(error).strip().splitlines():
        reason = f"{reason} {line.strip()}".strip()
        if not reason.endswith(":"):
            break
    return reason or type(error).__name__

"""Samples reach a worker once. The master knows what each has seen; a worker keeps what came, up to a limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringtmp.errors import ProtocolError

#: What a worker may keep of the data. Beyond it samples are sent again whenever they are needed.
KEPT_BYTES = 256 * 1024**2


class Ledger:
    """On the master: which samples a worker has."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._seen: dict[str, set[int]] = {}
        self._room = kept_bytes

    def to_send(
        self, table: str, numbers: torch.Tensor | None, inputs: Sequence[torch.Tensor], targets: torch.Tensor
    ) -> tuple[str, list[torch.Tensor | None]]:
        """What to send for these samples: the table they are kept in ('' : not kept), and the tensors of a Work."""
        if numbers is None:
            return "", [None, None, *inputs, targets]
        seen = self._seen.setdefault(table, set())
        listed: list[int] = numbers.tolist()
        new = [position for position, number in enumerate(listed) if number not in seen]
        size = sum(each[:1].nbytes for each in (*inputs, targets)) * len(new)
        if size > self._room:
            return "", [None, None, *inputs, targets]
        self._room -= size
        seen.update(listed)
        index = torch.tensor(new, dtype=torch.long)
        return table, [numbers, numbers[index], *(each[index] for each in inputs), targets[index]]


class Rows:
    """On a worker: the samples it has seen."""

    def __init__(self) -> None:
        self._tables: dict[str, _Kept] = {}

    def take(self, table: str, tensors: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The inputs and targets of a Work, in order, freshly allocated."""
        given = [each for each in tensors if each is not None]
        if not table:
            return given[:-1], given[-1]
        kept = self._tables.setdefault(table, _Kept())
        kept.add(given[1].tolist(), given[2:])
        picked = kept.pick(given[0].tolist())
        return picked[:-1], picked[-1]


class _Kept:
    """Rows in tensors that grow by doubling, found by their number."""

    def __init__(self) -> None:
        self._where: dict[int, int] = {}
        self._rows: list[torch.Tensor] = []

    def add(self, numbers: Sequence[int], columns: Sequence[torch.Tensor]) -> None:
        start = len(self._where)
        if not self._rows:
            self._rows = [each.clone() for each in columns]
        elif numbers:
            for position, column in enumerate(columns):
                rows = self._rows[position]
                if start + len(numbers) > len(rows):
                    larger = rows.new_empty((max(2 * len(rows), start + len(numbers)), *rows.shape[1:]))
                    larger[:start] = rows[:start]
                    self._rows[position] = rows = larger
                rows[start : start + len(numbers)] = column
        for offset, number in enumerate(numbers):
            self._where[number] = start + offset

    def pick(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        try:
            index = torch.tensor([self._where[number] for number in numbers], dtype=torch.long)
        except KeyError as error:
            raise ProtocolError(f"sample {error} was named but never came") from None
        return [rows[index] for rows in self._rows]

"""Members of a group share the optimizer state of their stage by whole parameters (ZeRO's first stage).

S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, ZeRO: Memory optimizations toward training trillion parameter models, SC 2020.

    every member                     owner of a bucket                  every member
    sums of its own microbatches --> the whole sum, and its norms
                                     the update, with its state -----> the parameters
    about half of what a group exchanges                                and the other half

A departure: what is shared are whole parameters, because a fused optimizer gives other bits at odd addresses, and norms of
parts are not those of the whole. So the bits are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ringtmp.errors import ProtocolError
from ringtmp.plan.route import Visit
from ringtmp.runtime.add_along_tree import flat_sum
from ringtmp.runtime.clipping import Norms
from ringtmp.runtime.mailbox import Mail
from ringtmp.runtime.stage import Stage
from ringtmp.strategies.ring.group_sums import GroupSums, check_values
from ringtmp.wire.messages import GroupNorms, GroupWeights

NORMS = "its norms"


class SharedState:
    """Of one visit, on one member of its group."""

    def __init__(
        self, visit: Visit, me: int, stage: Stage, sums: GroupSums, post: Callable[[int, Any, list[torch.Tensor]], None]
    ) -> None:
        self._visit, self._stage, self._sums, self._post = visit, stage, sums, post
        self._rank = visit.members.index(me)
        self._others = [node for node in visit.members if node != me]
        self._norms: dict[int, dict[int, Norms]] = {}  # by pass and sender
        self._weights: dict[int, dict[int, torch.Tensor]] = {}  # by pass and bucket

    # -- norms ----------------------------------------------------------------------------------------------------------

    def say_norms(self, turn: int, step: int) -> None:
        """To the first, who speaks for all."""
        self._post(self._visit.node, GroupNorms(turn, self._visit.index), self._stage.gradient_norms(step))

    def take_norms(self, mail: Mail) -> None:
        message = mail.message
        assert isinstance(message, GroupNorms)
        self._norms.setdefault(message.turn, {})[mail.sender] = mail.present()

    def norms(self, turn: int, step: int) -> Norms | None:
        """Of the whole stage, in the order of its parameters; None: somebody's have not come. Of a parameter that is another's
        a member says what stands for none, which is below every norm."""
        given = self._norms.get(turn, {})
        if len(given) < len(self._others):
            return None
        del self._norms[turn]
        every = [self._stage.gradient_norms(step), *given.values()]
        return [torch.stack(each).amax(0) for each in zip(*every, strict=True)]

    # -- parameters -----------------------------------------------------------------------------------------------------

    def send_weights(self, turn: int) -> None:
        """The update is made of what is this member's."""
        parameters = self._stage.parameters[0]
        for number, bucket in enumerate(self._sums.known_buckets()):
            if self._sums.owner(number) == self._rank:
                mine = [each.detach() for each in parameters[bucket.first : bucket.stop]]
                values = flat_sum(
                    mine, bucket.slots, bucket.size, bucket.dtype
                ).values  # a copy: the next update may be soon
                for node in self._others:
                    self._post(node, GroupWeights(turn, self._visit.index, number), [values])

    def take_weights(self, mail: Mail) -> None:
        message = mail.message
        assert isinstance(message, GroupWeights)
        (values,) = mail.present()
        self._weights.setdefault(message.turn, {})[message.bucket] = values

    def weights_came(self, turn: int) -> bool:
        known = self._sums.known_buckets()
        of_others = sum(self._sums.owner(number) != self._rank for number in range(len(known)))
        return len(self._weights.get(turn, ())) == of_others

    def put_weights(self, turn: int) -> None:
        """What the others have updated."""
        known, parameters = self._sums.known_buckets(), self._stage.parameters[0]
        with torch.no_grad():
            for number, values in self._weights.pop(turn, {}).items():
                bucket = known[number]
                for (start, stop), parameter in zip(bucket.slots, parameters[bucket.first : bucket.stop], strict=True):
                    parameter.copy_(values[start:stop].view(parameter.shape))

    # -- what others say --------------------------------------------------------------------------------------------------

    def owed_by(self, sender: int, clip: bool) -> Iterator[str]:
        """What another member sends here of every pass."""
        if clip and not self._rank:
            yield NORMS
        for number in range(len(self._sums.known_buckets())):
            if self._visit.members[self._sums.owner(number)] == sender:
                yield parameters_of(number)

    def check(self, message: GroupNorms | GroupWeights) -> str:
        """What it is of those owed. ProtocolError: of no bucket, or not as large as it must be."""
        if isinstance(message, GroupNorms):
            self._check_norms(message)
            return NORMS
        known = self._sums.known_buckets()
        if not 0 <= message.bucket < len(known):
            raise ProtocolError(f"sent bucket {message.bucket}, which there is not")
        check_values(message.tensors, True, known[message.bucket].size, known[message.bucket].dtype)
        return parameters_of(message.bucket)

    def _check_norms(self, message: GroupNorms) -> None:
        runs: list[tuple[str, tuple[int, ...]]] = []
        for each in self._stage.parameters[0]:
            dtype = str(each.dtype).removeprefix("torch.")
            if runs and runs[-1][0] == dtype:
                runs[-1] = (dtype, (runs[-1][1][0] + 1,))
            else:
                runs.append((dtype, (1,)))
        found = [None if each is None else (each.dtype, tuple(each.shape)) for each in message.tensors]
        if found != runs:
            raise ProtocolError(f"sent {message.tensors} as norms")


def parameters_of(bucket: int) -> str:
    return f"the parameters of bucket {bucket}"

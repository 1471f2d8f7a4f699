"""A group whose members do not wait for each other's gradients: each applies its own sums at once, the others' when they come.

J. Dean et al., Large scale distributed deep networks (DistBelief), NIPS 2012. T. Chilimbi et al., Project Adam, OSDI 2014.
E. Xing et al., Petuum: A new platform for distributed machine learning on big data, IEEE Trans. Big Data 2015.

    member i, step t    a_i(t) = f_i (Optimizer_i(w, g_i(t) / f_i) - w)
                        w <- w + a_i(t) + every a_j(s), s <= t, that has come    all of them with s <= t - B, or it waits

    g_i(t)    the sum over its own microbatches, which are the share f_i of the step's

The bound B is Petuum's (stale synchronous parallel): a step t begins with all that anybody made of the steps before t - B.
What is sent are changes of weights, as Petuum's workers send them, not gradients: every copy is the first weights and the sum
of all changes, in another order, so that copies differ by what is under way and by rounding, whatever the optimizer. Each
member keeps the optimizer state of its own gradients. Where all f_i are the same and nothing is late, plain descent makes the
step of one process, to rounding.

Departures: there is no server. A member's forward and backward of a microbatch see the same weights, so changes are applied
between two steps, and before an evaluation, a snapshot or a checkpoint all of them are. What a faster member made of a step
that has not ended here is held back: a snapshot from before step t has every change of the steps before t and no other, so
that going back to it applies nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringtmp.errors import ProtocolError
from ringtmp.plan.route import Visit
from ringtmp.runtime import compute_device
from ringtmp.runtime.add_along_tree import flat_sum
from ringtmp.runtime.mailbox import Mail
from ringtmp.runtime.stage import Stage
from ringtmp.strategies.ring.gradient_buckets import Bucket, buckets
from ringtmp.strategies.ring.group_sums import check_values
from ringtmp.strategies.ring.segment_queue import Pass
from ringtmp.wire.messages import GroupChange


class LateSums:
    """Of one visit, on one member of its group."""

    def __init__(
        self, visit: Visit, me: int, stage: Stage, *, bound: int, step: int,
        post: Callable[[int, Any, list[torch.Tensor]], None],
    ) -> None:  # fmt: skip
        """`bound`: steps that what others made may be late. `step`: updates done."""
        self._visit, self._stage, self._bound, self._post = visit, stage, bound, post
        self._me = me
        others = [node for node in visit.members if node != me]
        self._done = step  # updates made here
        #: By member, the step and the bucket that come next: of what is said, and of what is here.
        self._said = dict.fromkeys(others, (step, 0))
        self._here = dict.fromkeys(others, (step, 0))
        self._waiting: list[tuple[int, int, torch.Tensor]] = []  # changes here and not applied: step, bucket, values
        self._applied = step  # of every step before this everything is
        self.oldest = step  # what that was when the newest update's step began
        self._buckets: list[Bucket] = []

    def may_update(self, step: int) -> bool:
        """Whether what the bound demands is here."""
        return self._whole_before > step - self._bound

    @property
    def settled(self) -> bool:
        """Whether all that others made of the steps done here is here."""
        return self._whole_before >= self._done

    @property
    def _whole_before(self) -> int:
        """Of the steps before this one everything is here."""
        if not self._known():
            return self._done
        return min(step for step, _ in self._here.values())

    def update(self, current: Pass) -> None:
        """The step's own change, told to the others, and those of others that are here."""
        self.oldest = min(self._applied, current.step)
        share = current.microbatches / current.count
        parameters, known = self._stage.parameters[0], self._known()
        before = [flat_sum([each.detach() for each in _of(parameters, one)], one.slots, one.size, one.dtype).values
                  for one in known]  # fmt: skip
        gradients = [each.grad for each in parameters if each.grad is not None]
        if share and gradients:
            torch._foreach_mul_(gradients, 1 / share)
        self._stage.step(current.step, None)
        self._done = current.step + 1  # before anybody may build on it
        for number, (bucket, values) in enumerate(zip(known, before, strict=True)):
            with torch.no_grad():
                for (start, stop), each in zip(bucket.slots, _of(parameters, bucket), strict=True):
                    was = values[start:stop].view(each.shape)
                    change = (compute_device.taken_back(each.detach()) - was).mul_(share)
                    each.copy_(was + change)
                    was.copy_(change)
            message = GroupChange(current.step, self._visit.index, number)
            for node in self._visit.members:
                if node != self._me:
                    self._post(node, message, [values] if share else [])
        self.apply()

    def apply(self) -> None:
        """What is here of the steps done, where no microbatch is between its forward and its backward."""
        parameters, known = self._stage.parameters[0], self._known()
        due = [each for each in self._waiting if each[0] < self._done]
        self._waiting = [each for each in self._waiting if each[0] >= self._done]
        with torch.no_grad():
            for _, number, values in due:
                bucket = known[number]
                for (start, stop), each in zip(bucket.slots, _of(parameters, bucket), strict=True):
                    each.add_(values[start:stop].view(each.shape).to(each.device))
        self._applied = min(self._whole_before, self._done)

    def take(self, mail: Mail) -> None:
        message = mail.message
        assert isinstance(message, GroupChange)
        self._waiting += [(message.step, message.bucket, each) for each in mail.present()]
        self._here[mail.sender] = self._behind(self._here[mail.sender])

    def _behind(self, place: tuple[int, int]) -> tuple[int, int]:
        step, bucket = place
        return (step, bucket + 1) if bucket + 1 < len(self._known()) else (step + 1, 0)

    def _known(self) -> list[Bucket]:
        if not self._buckets:  # layers may still be on their way here; or nothing of them is trained
            self._buckets = buckets(self._stage.parameters[0])
        return self._buckets

    def check(self, sender: int, message: GroupChange) -> None:
        """ProtocolError: not the next, further ahead than the bound lets anyone be, or not as large as it must be."""
        known, place = self._known(), (message.step, message.bucket)
        if not known or place != self._said[sender] or message.step >= self._done + self._bound:
            raise ProtocolError(f"sent change {message.bucket} of step {message.step} out of turn")
        bucket = known[message.bucket]
        check_values(message.tensors, bool(message.tensors), bucket.size, bucket.dtype)
        self._said[sender] = self._behind(place)


def _of(parameters: list[torch.Tensor], bucket: Bucket) -> list[torch.Tensor]:
    return parameters[bucket.first : bucket.stop]

"""The master of an ensemble: gives each worker its own model and its own bag, and combines what they predict.

    evaluate:  every worker predicts every sample; the combined prediction is scored
    stacking:  a <- weights, at least 0 and 1 in all, with the least loss of  sum over i of a_i p_i(x)  over samples x of the
               last training batches, without p_i where x is in bag i: else whoever knows x by heart would count most
    save:      all members, with their optimizer state, and the weights

Departure from stacking as published: its first level is trained several times, on parts of the data in turn, so that every
sample is out of somebody's training set; here the bags see to that. A sample that is in every bag, as one may be with
bootstrap, is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from ringtmp.data.batches import Batch
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.model import portable_layer
from ringtmp.model.ensemble import Combine, combined, equal_weights, stacking_weights
from ringtmp.model.frozen_parameters import frozen_names
from ringtmp.plan.route import MASTER
from ringtmp.runtime.base_leader import Start
from ringtmp.runtime.checkpoint import Checkpoint, CheckpointWriter
from ringtmp.runtime.ensemble_members import Member, add_weights, number_of
from ringtmp.runtime.losses import LOSSES, Score, class_dim_of
from ringtmp.runtime.mailbox import Mail
from ringtmp.strategies.base import PlanRequest
from ringtmp.strategies.data_parallel.leader import PLACING_BYTES, DataParallelLeader
from ringtmp.strategies.data_parallel.own_samples import joined
from ringtmp.strategies.data_parallel.plan import ParallelPlan
from ringtmp.strategies.ensemble import EnsembleSettings
from ringtmp.strategies.ensemble.bags import counts, numbers_of, pieces
from ringtmp.wire.messages import Message, Place, Predicted, Work

#: Samples that weights of members are fitted on, at most.
STACKING_SAMPLES = 1024


class CombiningLeader(DataParallelLeader):
    def __init__(self, start: Start, plan: ParallelPlan) -> None:
        super().__init__(start, plan)
        request = plan.request
        self._settings: EnsembleSettings = plan.strategy.read(plan.enlist.settings)
        self._loss = request.loss
        self._class_dim = class_dim_of(request.loss_name)
        self._output = request.index.outputs[-1][0]
        self._dealt_among = plan.roles.workers  # bags are theirs for as long as this generation lasts
        self._predictions: dict[int, list[torch.Tensor]] = {}  # by worker, of what was asked
        self._unpredicted: dict[int, deque[int]] = {worker: deque() for worker in self._workers}  # samples asked for
        self._recent: deque[tuple[int, Batch]] = deque()  # the newest training batches, with their steps
        self._fitted: tuple[int, tuple[int, ...], torch.Tensor] | None = None  # of which step and workers

    def lay_out(self, checkpoint: Checkpoint) -> None:
        enlist, count = self._plan.enlist, len(self._layers)
        for node in self._workers:
            if node != MASTER:
                self.endpoint.post(node, enlist)
        for index, layer in enumerate(self._layers):
            for member, worker in enumerate(self._workers):
                tensors, state = Member(checkpoint, member, count).layer(index, layer)
                moving = [*tensors, *state.values()]
                self.endpoint.post(worker, Place(index, portable_layer.encode(layer), tuple(state)), moving)
                self._settle(PLACING_BYTES)
        if self._plan.loss is not None:
            layer, tensors = self._plan.loss
            for worker in self._workers:
                self.endpoint.post(worker, Place(count, portable_layer.encode(layer), ()), tensors)
        self._settle(0)
        self._laid_out = True

    # -- bags ---------------------------------------------------------------------------------------------------------

    def _deal(self, step: int, batch: Batch, fresh: bool) -> None:
        super()._deal(step, batch, fresh)
        if self._settings.combine == "stacking":
            self._recent.append((step, batch))
            while sum(each.samples for _, each in self._recent) > max(STACKING_SAMPLES, batch.samples):
                self._recent.popleft()

    def _counts(self, worker: int, batch: Batch, step: int) -> torch.Tensor:
        member, members = self._dealt_among.index(worker), len(self._dealt_among)
        seed = self._plan.enlist.recipe.seed
        return counts(numbers_of(batch, step), member, members, self._settings.sample, seed)

    def _send_work(self, worker: int, step: int, batch: Batch, training: bool, fresh: bool) -> float:
        """A member's bag of the batch."""
        count = len(batch.targets)
        inputs, targets, numbers = joined(batch, 0, count)
        bag = torch.arange(batch.samples).repeat_interleave(self._counts(worker, batch, step))
        parts = 1 if self._settings.sample == "bootstrap" else len(self._dealt_among)
        sizes = pieces(len(bag), -(-count // parts), self._plan.request.index.least_microbatch)
        first = self._dealt_among.index(worker) * count  # other dropout than the other members'
        work = Work(step, training, fresh, batch.samples, first, sizes, "train", microbatches=len(sizes))
        chosen = [each[bag] for each in inputs], targets[bag], None if numbers is None else numbers[bag]
        return self._post_work(worker, work, chosen if sizes else None)

    # -- predictions --------------------------------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Batch], step: int, bytes_model: bool) -> Score:
        score, weights = Score(bytes_model=bytes_model), self._weights(step)
        for batch in batches:
            found = self._predicted(batch, step, "test")
            if len(found) != len(weights):  # one was lost
                weights = self._weights(step)
            together = combined(list(found.values()), weights, self._settings.combine, self._class_dim)
            first = 0
            for targets in batch.targets:
                outputs = together[first : first + len(targets)]
                score.add(float(self._loss(outputs, targets)), outputs, targets)
                first += len(targets)
        return score

    def _predicted(self, batch: Batch, step: int, table: str) -> dict[int, torch.Tensor]:
        """Of the whole batch, by worker; again if one was lost meanwhile. `table`: where its samples' numbers count."""
        sizes = tuple(len(each) for each in batch.targets)
        work = Work(step, False, False, batch.samples, 0, sizes, table, microbatches=len(sizes))
        asked, workers, self._predictions = 0, tuple[int, ...](), {}
        while workers != self._workers:
            asked, workers = asked + 1, self._workers
            for worker in workers:
                self._unpredicted[worker].append(batch.samples)
                self._post_work(worker, work, joined(batch, 0, len(sizes)))
            self._until(
                lambda asked=asked: not self._mute(asked),  # type: ignore[misc]
                lambda asked=asked: f"node {self._mute(asked)[0]} to predict",  # type: ignore[misc]
                self._stall_limit(),
            )
        return {worker: self._predictions[worker][-1] for worker in workers}

    def _mute(self, asked: int) -> list[int]:
        return [worker for worker in self._workers if len(self._predictions.get(worker, ())) < asked]

    def _hear(self, mail: Mail) -> bool:
        if not isinstance(mail.message, Predicted):
            return super()._hear(mail)
        self._unpredicted[mail.sender].popleft()
        self._predictions.setdefault(mail.sender, []).extend(mail.present())
        return True

    def _inspect(self, sender: int, message: Message) -> None:
        super()._inspect(sender, message)
        if not isinstance(message, Predicted):
            return
        asked = self._unpredicted.get(sender)
        if not asked:
            raise ProtocolError("sent predictions that nobody asked for")
        specs = message.tensors
        if len(specs) != 1 or specs[0] is None or not self._output.allows(specs[0]) or specs[0].shape[0] != asked[0]:
            raise ProtocolError(f"sent {specs} as predictions for {asked[0]} samples")

    # -- how much each counts -----------------------------------------------------------------------------------------

    def _weights(self, step: int) -> torch.Tensor:
        equal = equal_weights(len(self._workers))
        if self._settings.combine != "stacking" or len(equal) == 1 or not self._recent:
            return equal
        if self._fitted is None or self._fitted[:2] != (step, self._workers):
            weights = self._fit(step)
            self._fitted = (step, self._workers, weights)
        return self._fitted[2]

    def _fit(self, step: int) -> torch.Tensor:
        outputs: dict[int, list[torch.Tensor]] = {}
        targets, fresh = list[torch.Tensor](), list[torch.Tensor]()
        for dealt, batch in self._recent:
            found = self._predicted(batch, step, "train")
            for worker, predicted in found.items():
                outputs.setdefault(worker, []).append(predicted)
            targets.append(torch.cat(list(batch.targets)))
            unseen = [self._counts(worker, batch, dealt) == 0 for worker in found]
            fresh.append(torch.stack(unseen, 1))
        everyone = [torch.cat(outputs[worker]) for worker in self._workers]
        if any(len(each) != len(everyone[0]) for each in everyone):  # one was lost meanwhile: then all are asked again
            return self._fit(step)
        return fit(everyone, torch.cat(targets), torch.cat(fresh), self._loss, self._class_dim)

    # -- to the disk --------------------------------------------------------------------------------------------------

    def save(self, writer: CheckpointWriter) -> None:
        while not self._all_saved(writer):
            writer.begin_again()

    def _all_saved(self, writer: CheckpointWriter) -> bool:
        """False: one was lost meanwhile, and members behind it have other numbers now."""
        weights, workers = self._weights(self._committed), self._workers
        for index, layer in enumerate(self._layers):
            self._collect(index, (), apart=True)
            if self._workers != workers:
                return False
            own = len(layer.tensors)
            for member, worker in enumerate(workers):
                message, given = self._states[worker]
                state = dict(zip(message.state, given[own:], strict=True))
                frozen = frozenset() if member else frozen_names(layer)
                writer.add(number_of(member, index, len(self._layers)), layer, given[:own], state, frozen)
        add_weights(writer, weights)
        return True


def fit(
    outputs: Sequence[torch.Tensor], targets: torch.Tensor, fresh: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], class_dim: int | None,
) -> torch.Tensor:  # fmt: skip
    """`outputs`: of every member; `fresh`: by sample and member, whether the member has not learned from it."""
    alike: dict[tuple[bool, ...], list[int]] = {}
    for place, row in enumerate(fresh.tolist()):
        if sum(row) > 1:  # with one member alone, weights make no difference
            alike.setdefault(tuple(row), []).append(place)
    count = sum(map(len, alike.values()))
    if not count:
        return equal_weights(len(outputs))

    def mean_loss(weights: torch.Tensor) -> torch.Tensor:
        total = weights.new_zeros(())
        for row, places in alike.items():
            among = [member for member, is_fresh in enumerate(row) if is_fresh]
            parts = weights[among] / weights[among].sum()
            together = combined([outputs[each][places] for each in among], parts, "stacking", class_dim)
            total = total + loss(together, targets[places]) * (len(places) / count)
        return total

    return stacking_weights(mean_loss, len(outputs))


def refuse_uncombined(request: PlanRequest, combine: Combine) -> None:
    """UsageError for a model whose predictions cannot be combined, or not so."""
    known = LOSSES.get(request.loss_name)
    if (known is not None and known.of_model) or request.layers[-1].output.kind != "*":
        raise UsageError(
            "an ensemble combines predictions: it needs a model that returns one tensor, and a loss of it and the targets"
        )
    if combine == "vote" and class_dim_of(request.loss_name) is None:
        classes = ", ".join(name for name, each in LOSSES.items() if each.class_dim is not None)
        raise UsageError(
            f"combine=vote needs a loss over classes ({classes}), not {request.loss_name}: use combine=mean"
        )

"""A worker of the parameter-server strategy: which parameters it has, what it asks for, what it pushes. See member.py."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import torch

from ringtmp.errors import ProtocolError, Unasked
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.model.sufficient_factors import Factors
from ringtmp.runtime.gradient_sums import Sums
from ringtmp.runtime.learning_rates import learning_rate
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.strategies.data_parallel.linear_gradients import known, together
from ringtmp.strategies.data_parallel.parameter_keys import Key
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.trainer import Exchange
from ringtmp.strategies.ps.settings import PsSettings
from ringtmp.strategies.ps.team_sums import TeamSums
from ringtmp.strategies.ps.teams import Team
from ringtmp.wire.formats import ErrorFeedback, wire_format
from ringtmp.wire.messages import Enlist, Pull, Pulled, Push

#: What a worker may have pushed to a server without an answer, where answers do not wait for all gradients.
AHEAD_BYTES = 6 * 1024**2


class Client(Exchange):
    """A worker's side: which parameters it has, what it has asked for, what it has pushed."""

    cause = "parameters"

    def __init__(
        self, endpoint: Endpoint, plan: Enlist, settings: PsSettings, replica: Replica,
        *, table: Sequence[Key], owners: Sequence[int], recorder: Recorder, team: Team = (),
    ) -> None:  # fmt: skip
        """`team`: workers that sum gradients among themselves before the first of them pushes them; none: it pushes its own."""
        self.endpoint = endpoint
        self._plan = plan
        self._settings = settings
        self._table = table
        self._owners = list(owners)
        self._recorder = recorder
        self._replica = replica
        self._layers: list[list[Key]] = [[] for _ in plan.sizes]
        for key in table:
            self._layers[key.layer].append(key)
        self._asked: dict[int, Pull] = {}  # what is still to be answered
        self._questions: Counter[tuple[int, int]] = Counter()  # (key, step): how often it was asked for
        self._answered = dict.fromkeys(range(len(table)), -1)  # the step a key's newest answer is for
        self._versions = dict.fromkeys(range(len(table)), -1)  # every update before this step is in it
        # By key: values; `change`: to be added, or (with places) to be put there.
        self._incoming: dict[int, list[tuple[bool, torch.Tensor, torch.Tensor | None]]] = {}
        self._linear = known(plan.linear)
        self._wire = wire_format(plan.wire)
        self._feedback = ErrorFeedback(self._wire)
        self._used: list[int] = []
        self._unconfirmed: dict[int, list[tuple[Push, list[torch.Tensor]]]] = {key.number: [] for key in table}
        self._fresh = False
        self.given_up = 0  # steps
        self._held: list[tuple[int, int, float, torch.Tensor]] = []  # gradients waiting to be clipped
        self._to_push: deque[tuple[Key, Push, list[torch.Tensor]]] = deque()
        self._unanswered: dict[int, tuple[int, int]] = {}  # key -> owner, bytes pushed
        # By layer, gradients that are to be pushed together: the newest one's step, their shares, their sum.
        self._accrued: dict[int, tuple[int, float, torch.Tensor]] = {}
        self._local = settings.n_push > 1 or settings.n_fetch > 1
        self._asks_early = not (settings.eager or self._layerwise or self._local or settings.change is not None)
        self._paced = settings.deterministic and not self._layerwise and plan.recipe.clip_norm is None
        self._pushes = not team or team[0] == endpoint.node
        self.team_sums = (
            TeamSums(endpoint, plan, team, recorder, lag=settings.lag, finished=self._summed) if team else None
        )

    def begin(self, fresh: bool) -> None:
        self._fresh = fresh

    def ready(self, layer: int, step: int, training: bool) -> bool:
        """Await w. Asks, where nothing has been asked for yet, for every layer from this one on (layerwise: one ahead)."""
        exact = not training and not self._settings.deterministic
        if exact:
            self.rest()
        elif self._settings.change is not None:
            return self._read_in_order(layer, step)
        elif self._local:
            step -= step % self._settings.n_fetch
        waiting = any(self._missing(key, step, exact) for key in self._layers[layer])
        if waiting or self._layerwise:
            for deeper in self._layers[layer : layer + 2 if self._layerwise else None]:
                # What has come once, comes again by itself where servers are eager.
                new = [key for key in deeper if self._answered[key.number] < 0]
                self._ask_for(new if self._settings.eager and not exact else deeper, step, exact)
        if waiting:
            return False
        self._take_up(layer, training)
        return True

    def _take_up(self, layer: int, training: bool) -> None:
        for key in self._layers[layer]:
            self._load(key)
        if training:
            self._used += [self._versions[key.number] for key in self._layers[layer]]

    def _read_in_order(self, layer: int, step: int) -> bool:
        """Under a bound on changes a worker that waits for a key may use none that comes later: else two could wait for
        each other, each computing with what the other wants changed."""
        for key in self._layers[layer]:
            if self._missing(key, step):
                self._ask(key, step)
                return False
        self._take_up(layer, True)
        return True

    def again(self, layer: int, step: int) -> bool:
        if not self._layerwise:
            return True
        for deeper in reversed(self._layers[max(0, layer - 1) : layer + 1]):
            self._ask_for(deeper, step)
        return not any(self._missing(key, step) for key in self._layers[layer])

    def used(self, layer: int) -> None:
        if self._layerwise:
            self._replica.drop(layer)
            self._answered.update({key.number: -1 for key in self._layers[layer]})

    def overtaken(self, step: int) -> bool:
        return self._settings.quorum is not None and max(self._versions.values()) > step

    def give_up(self, step: int) -> None:
        """Servers know that nothing more comes of this step."""
        self.rest()
        self.given_up += 1
        for key in self._table:
            self._to_push.append((key, Push(key.number, step, 0.0, False), []))
        self._send_pushes()

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if self._plan.recipe.clip_norm is not None and not self._settings.gathered:
            self._clip_and_push(layer, step, share, gradient)
        else:
            self._hand_over(layer, step, share, gradient)

    def factors(self, layer: int, step: int, share: float, factors: Sequence[Factors]) -> None:
        linear = self._linear[layer]
        rows, errors = together(linear, factors)
        for key in self._layers[layer]:
            low, high = linear.columns(key.start, key.stop)
            if len(rows) and len(rows) * (linear.inputs + high - low) <= key.size:
                sent = [*self._wire.encode(rows), *self._wire.encode(errors[:, low:high].contiguous())]
                push = Push(key.number, step, share, self._fresh, rows=len(rows))
            else:
                sent = self._feedback.encode(key.number, linear.gradient(key.start, key.stop, rows, errors))
                push = Push(key.number, step, share, self._fresh)
            self._to_push.append((key, push, sent))
        self._send_pushes()

    def sums(self, layer: int, step: int, share: float, sums: list[Sums | None]) -> None:
        for at, key in enumerate(self._layers[layer]):  # a key is a tensor
            for node, found in zip(self.nodes, sums, strict=True):
                gradient = None if found is None else found[at]
                tensors = [] if gradient is None else [gradient.reshape(-1)]
                self._to_push.append((key, Push(key.number, step, share, self._fresh, node), tensors))
        self._send_pushes()

    def oldest(self) -> int | None:
        oldest = min(self._used, default=None)
        self._used = []
        return oldest

    def pulled(self, message: Pulled, mail: Mail) -> None:
        key = self._table[message.key]
        asked_for = bool(self._questions[key.number, message.step])
        unasked = self._settings.eager and message.step == message.oldest + int(self._settings.bound)
        if not asked_for and not unasked:
            raise Unasked(message.key, message.step)
        # What comes by itself may be for the step of a question that is still to be answered.
        self._questions[key.number, message.step] -= asked_for and not (unasked and self._settings.bound)
        if not self._questions[key.number, message.step]:
            del self._questions[key.number, message.step]
        self._recorder.received(key.layer, -1, mail.first_at, mail.arrived_at, mail.payload_bytes)
        asked = self._asked.get(key.number)
        if asked is not None and asked.step <= (message.oldest if asked.exact else message.step):
            del self._asked[key.number]
        settled = key.number not in self._asked and (self._settings.eager or asked is not None)
        if settled and self._unanswered.pop(key.number, None) is not None and self._to_push:
            self._send_pushes()
        if self._settings.change is None or asked is None or not asked.exact:  # what is evaluated is not in use
            self._answered[key.number] = max(self._answered[key.number], message.step)
        self._versions[key.number] = max(self._versions[key.number], message.oldest)
        queue = self._incoming.setdefault(key.number, [])
        if not message.change:
            queue.clear()
        queue.append(self._opened(message, mail.present(), key))
        kept = self._unconfirmed[key.number]
        self._unconfirmed[key.number] = [each for each in kept if each[0].step >= message.oldest]
        if not self._settings.lag and asked is not None:
            # Asked for after the layer's backward pass: nobody is using the old values. An answer nobody waits for any
            # more (one came that was newer than it had to be) waits for the next forward pass.
            self._load(key)

    # -- parts --------------------------------------------------------------------------------------------------------

    @property
    def _layerwise(self) -> bool:
        return self._settings.fetch == "layerwise"

    def _ask_for(self, wanted: Sequence[Key], step: int, exact: bool = False) -> None:
        for key in wanted:
            if self._missing(key, step, exact):
                self._ask(key, step, exact)

    def _missing(self, key: Key, step: int, exact: bool = False) -> bool:
        return (self._versions if exact else self._answered)[key.number] < step

    def _ask(self, key: Key, step: int, exact: bool = False) -> None:
        asked = self._asked.get(key.number)
        if asked is not None and asked.step >= step and asked.exact >= exact:
            return
        self._asked[key.number] = pull = Pull(key.number, step, exact)
        self._questions[key.number, step] += 1
        self.endpoint.post(self._owners[key.number], pull)

    def _load(self, key: Key) -> None:
        if key.number not in self._incoming:
            return
        self._replica.hold(key.layer)
        values = self._replica.values[key.layer][key.start : key.stop]
        for change, tensor, places in self._incoming.pop(key.number, ()):
            if places is not None:
                values[places] = tensor
            elif change:
                values.add_(tensor)
            else:
                values.copy_(tensor)

    def _opened(
        self, message: Pulled, tensors: Sequence[torch.Tensor], key: Key
    ) -> tuple[bool, torch.Tensor, torch.Tensor | None]:
        if not (message.change and self._settings.significant):
            return message.change, self._wire.decode(tensors, key.size), None
        places = tensors[1].long()
        if len(places) and (int(places.min()) < 0 or int(places.max()) >= key.size):
            raise ProtocolError(f"sent a value for place {int(places.max())} of key {key.number}, which has {key.size}")
        return True, tensors[0], places

    def _hand_over(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if not self._local:
            self._push(layer, step, share, gradient)
            return
        # Downpour: accrued <- accrued + g;  w <- w - rate(t) g, until the next parameters come
        if share:
            recipe = self._plan.recipe
            rate = learning_rate(recipe.schedule, recipe.optimizer_settings["lr"], step)
            self._replica.values[layer].add_(gradient, alpha=-rate / share)
        if layer in self._accrued:
            _, shares, total = self._accrued[layer]
            share, gradient = share + shares, total.add_(gradient)
        self._accrued[layer] = (step, share, gradient)
        if (step + 1) % self._settings.n_push == 0:
            self._push(layer, *self._accrued.pop(layer))
        ahead = step + 1 + self._settings.lag
        if ahead % self._settings.n_fetch == 0:
            self._ask_for(self._layers[layer], ahead)

    def rest(self) -> None:
        for layer in sorted(self._accrued, reverse=True):
            self._push(layer, *self._accrued.pop(layer))

    def _push(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if self.team_sums is None:
            self._push_keys(layer, step, share, gradient)
        elif self._layers[layer]:
            self.team_sums.start(step, layer, gradient)

    def _summed(self, step: int, layer: int, vector: torch.Tensor) -> None:
        """Over the team. What share of the batch that is of, its head knows."""
        if self._pushes:
            self._push_keys(layer, step, 0.0, vector.clone())  # parts of it are still on their way to the others
        else:
            self._ask_for(self._layers[layer], step + 1 + self._settings.lag)

    def _push_keys(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        for key in self._layers[layer]:
            tensors = self._feedback.encode(key.number, gradient[key.start : key.stop])
            self._to_push.append((key, Push(key.number, step, share, self._fresh), tensors))
        self._send_pushes()

    def _send_pushes(self) -> None:
        """In their order, as far as each key's server may have them."""
        held: deque[tuple[Key, Push, list[torch.Tensor]]] = deque()
        ahead = Counter[int]()
        for owner, nbytes in self._unanswered.values():
            ahead[owner] += nbytes
        for key, push, tensors in self._to_push:
            owner, nbytes = self._owners[key.number], sum(each.nbytes for each in tensors)
            if ahead[owner] >= AHEAD_BYTES:
                held.append((key, push, tensors))
                continue
            if owner != self.endpoint.node:
                self._recorder.count_sent(nbytes)
            self.endpoint.post(owner, push, tensors)
            if self._paced:
                ahead[owner] += nbytes
                self._unanswered[key.number] = (owner, nbytes * max(1, len(self.nodes)))
            if self._settings.replicas:
                self._unconfirmed[key.number].append((push, tensors))
            if self._asks_early:
                self._ask(key, push.step + 1 + self._settings.lag)
        self._to_push = held

    def _clip_and_push(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        """Each gradient is an update of its own, so each is clipped on its own, when the whole of it is known."""
        self._held.append((layer, step, share, gradient))
        if layer > 0:
            return
        limit = self._plan.recipe.clip_norm
        assert limit is not None
        squares = sum(float(each.double().square().sum()) for *_, each in self._held)
        factor = min(1.0, limit * share / (squares**0.5 + 1e-6))  # the gradient is the mean times the share
        for each_layer, _, _, each in self._held:
            self._hand_over(each_layer, step, share, each.mul_(factor))
        self._held.clear()

    def lose(self, node: int, heir: int) -> None:
        """Send again what the lost server may not have passed on, and ask again."""
        for key in self._table:
            if self._owners[key.number] != node:
                continue
            self._owners[key.number] = heir
            if key.number in self._unanswered:
                self._unanswered[key.number] = (heir, self._unanswered[key.number][1])
            for push, tensors in self._unconfirmed[key.number]:
                self.endpoint.post(heir, push, tensors)
            asked = self._asked.get(key.number)
            if asked is not None:
                self._questions[key.number, asked.step] += 1
                self.endpoint.post(heir, asked)

"""Layer costs summed up: what any run of layers costs at one microbatch size, in constant time.

Pure. A cut before layer i lets `cut_bytes[i]` through per microbatch and direction; nothing enters before layer 0,
because the inputs are on the master.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ringtmp.errors import UsageError
from ringtmp.plan.devices import LayerCost
from ringtmp.plan.minimum_layers_per_stage import Ends


@dataclass(frozen=True, slots=True)
class StageCost:
    """A run of layers on one visit, per microbatch (update: per step), on the profiled machine."""

    forward_s: float
    backward_s: float
    update_s: float
    input_bytes: float
    output_bytes: float
    stored_bytes: float
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    weights_s: float = 0.0  # of backward_s: weight gradients that may wait
    waiting_bytes: float = 0.0  # gradients of shared weights that wait for deeper ones


class CostTable:
    """Prefix sums over the layers at `samples` per microbatch; bytes that travel are scaled by `wire_ratio`. With
    `recompute` backward goes forward once more, and only the microbatch at work has its activations stored. Of weights
    `versions` are kept, of gradients `sums`. `shares_state`: members of a group each keep some of the optimizer state;
    `late`: steps that what they make may be late."""

    def __init__(
        self,
        layers: Sequence[LayerCost],
        samples: float,
        wire_ratio: float = 1.0,
        recompute: bool = False,
        versions: int = 1,
        sums: int = 1,
        shares_state: bool = False,
        late: int = 0,
    ) -> None:
        if not layers:
            raise UsageError("the model has no layers")
        at = [layer.at(samples) for layer in layers]
        self.layers = tuple(layers)
        self.samples = samples
        self.wire_ratio = wire_ratio
        self.recompute = recompute
        self._sums = sums
        self.shares_state = shares_state
        self._late = late
        self.largest_state = [_largest_state(each) for each in layers]  # of one parameter
        self.count = len(layers)
        self.forward_s = _sums(each.forward_s for each in at)
        again = 1.0 if recompute else 0.0
        self.backward_s = _sums(each.backward_s + again * each.forward_s for each in at)
        self.weights_s = _sums(each.weights_s for each in at)
        self.update_s = _sums(layer.update_s for layer in layers)
        self.stored = _sums(each.stored_bytes for each in at)
        #: Besides what is stored, by layer: gradients on their way, and a weight that is kept small as float32.
        self.working = [point.stored_bytes + layer.converted_bytes for point, layer in zip(at, layers, strict=True)]
        self.waiting = _sums(layer.waiting_bytes for layer in layers)
        self.weights = _sums(layer.weight_bytes + (versions - 1) * layer.gradient_bytes for layer in layers)
        self.gradients = _sums(layer.gradient_bytes for layer in layers)
        self.optimizer = _sums(layer.optimizer_bytes for layer in layers)
        self.crossing_bytes = [0.0, *(each.output_bytes for each in at)]  # as they lie in memory
        self.cut_bytes = [each * wire_ratio for each in self.crossing_bytes]  # as they travel
        self.has_parameters = [layer.has_parameters for layer in layers]

    def stage(self, first: int, stop: int) -> StageCost:
        def over(sums: list[float]) -> float:
            return sums[stop] - sums[first]

        return StageCost(
            over(self.forward_s), over(self.backward_s), over(self.update_s), self.crossing_bytes[first],
            output_bytes=self.crossing_bytes[stop], stored_bytes=over(self.stored),
            waiting_bytes=over(self.waiting), weight_bytes=over(self.weights),
            gradient_bytes=over(self.gradients) * self._sums, optimizer_bytes=over(self.optimizer),
            weights_s=over(self.weights_s),
        )  # fmt: skip

    def optimizer_bytes(self, first: int, stop: int, members: int) -> float:
        """What a member of a group keeps at most: whole parameters, the largest first to whoever has least."""
        total = self.optimizer[stop] - self.optimizer[first]
        if members == 1 or not self.shares_state:
            return total
        return most_kept(total, max(self.largest_state[first:stop], default=0.0), members)

    def exchanged(self, members: int) -> int:
        """Vectors of a stage's gradients that a member of a group has on their way: what comes of others while they add up;
        or where they do not wait, its own changes, as many steps as they may be late, and one of every member's."""
        return 0 if members == 1 else self._late + members if self._late else 1

    @property
    def mean_cut_bytes(self) -> float:
        """Of all places where the layers could be cut."""
        return sum(self.cut_bytes[1:-1]) / max(self.count - 1, 1)

    def stored_by(self, count: int) -> int:
        """Of `count` microbatches held, those whose activations are stored."""
        return min(count, 1) if self.recompute else count

    @property
    def least_front(self) -> int:
        """Layers the front needs so that raw inputs stay on the master."""
        return Ends.of(self.has_parameters).front

    @property
    def least_tail(self) -> int:
        """Layers the tail needs so that labels, and what shows them, stay on the master."""
        return Ends.of(self.has_parameters).tail

    @property
    def parameter_bytes(self) -> float:
        """What a gradient exchange carries one way."""
        return self.gradients[-1]


def most_kept(total: float, largest: float, members: int) -> float:
    """Of optimizer state that is dealt out by whole parameters."""
    return min(total, total / members + largest * (1 - 1 / members))


def _largest_state(layer: LayerCost) -> float:
    if layer.largest_bytes is None or not layer.gradient_bytes:
        return layer.optimizer_bytes
    return layer.optimizer_bytes * layer.largest_bytes / layer.gradient_bytes


def _sums(values: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(float(each) for each in values)]

"""How randomness is seeded: dropout draws the same numbers wherever its operator lies.

By operator: before every random operator, from its ordinal in the whole model, so that bits depend on no cut and on no
boundary between layers. By layer, the rule of older runs: before every layer, from its index. A run keeps the rule it began
with (`LayerIndex.randomness`).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import partial

from ringtmp.model.portable_layer import Layer
from ringtmp.model.run_graph import Reseed
from ringtmp.runtime import compute_device
from ringtmp.wire.messages import Randomness

#: The loss comes after all operators of the model, however many there are.
LOSS = -1


def random_key(seed: int, step: int, microbatch: int, ordinal: int) -> int:
    """The seed of an operator's, or a layer's, randomness in one microbatch: depends on nothing else."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, microbatch, ordinal), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generator(seed: int, step: int, microbatch: int, before: int, ordinal: int = 0) -> None:
    """For the random operator number `before + ordinal`."""
    compute_device.seed(random_key(seed, step, microbatch, before + ordinal))


@dataclass(frozen=True, slots=True)
class RandomKeys:
    """The seeds for one microbatch of one step, on its way through a segment."""

    seed: int
    step: int
    microbatch: int
    rule: Randomness

    def begin_layer(self, index: int, layer: Layer, training: bool) -> Reseed | None:
        """What the layer's graph calls before each of its random operators; None: the generator just goes on from here."""
        if self.rule == "layer":
            seed_generator(self.seed, self.step, self.microbatch, index)
            return None
        before = layer.random_before if training else layer.random_before_evaluating
        return partial(seed_generator, self.seed, self.step, self.microbatch, before)

    def begin_loss(self) -> None:
        """After a segment: a loss that draws is seeded once. By layer, the generator goes on from the last layer."""
        if self.rule == "operator":
            seed_generator(self.seed, self.step, self.microbatch, LOSS)

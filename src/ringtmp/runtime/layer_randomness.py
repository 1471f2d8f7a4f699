"""The seed of a layer's randomness: dropout draws the same numbers wherever its layer lies."""

from __future__ import annotations

import hashlib
import struct


def random_key(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The seed of a layer's randomness in one microbatch: depends on nothing else, above all not on the cut."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, microbatch, layer), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

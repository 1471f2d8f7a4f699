"""A step and a test in a few words, for every way to show progress."""

from __future__ import annotations

from ringtmp.metrics.events import Evaluated, StepDone
from ringtmp.units import rate_text


def smoothed(before: float, event: StepDone) -> float:
    """Samples per second, in which one slow step does not show."""
    speed = event.samples / max(event.wall_s, 1e-9)
    return speed if not before else 0.9 * before + 0.1 * speed


def details(event: StepDone, samples_per_s: float, idle: float) -> str:
    text = f"loss {event.loss:.4f}  {rate_text(samples_per_s)} samples/s  idle {idle:.0%}"
    return f"{text}  unprotected" if event.unprotected else text


def score(event: Evaluated) -> str:
    parts = [f"test loss {event.loss:.4f}"]
    if event.bits_per_byte is not None:
        parts.append(f"{event.bits_per_byte:.3f} bits per byte")
    if event.perplexity is not None:
        parts.append(f"perplexity {event.perplexity:.4g}")
    if event.bits_per_byte is None and event.accuracy is not None:
        parts.append(f"accuracy {event.accuracy:.1%}")
    return "  ".join(parts)

"""A run's settings: declared in settings.py, checked one by one, changed on resume.

A setting that could change the bits is never a function of the number of nodes, of a device or of timing. What takes a
strategy or an optimizer to judge is checked where these are known (run/check_settings.py).
"""

from __future__ import annotations

from ringtmp.config.build import SETTINGS, checked, from_tree, merge_for_resume, replaced, usual_microbatches, value_of
from ringtmp.config.parse_text import parse_pairs, parse_schedule
from ringtmp.config.setting_declaration import Setting
from ringtmp.config.settings import DEFAULT_EPOCHS, KeepPart, ModelPart, RingPart, RunConfig, StreamKeep, TrainingPart

__all__ = [
    "DEFAULT_EPOCHS", "SETTINGS", "KeepPart", "ModelPart", "RingPart", "RunConfig", "Setting", "StreamKeep",
    "TrainingPart", "checked", "from_tree", "merge_for_resume", "parse_pairs", "parse_schedule", "replaced",
    "usual_microbatches", "value_of",
]  # fmt: skip

"""What a module was exported to is kept for the next run, and not believed where it no longer fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ordinary_models import SharedBlock, vectors
from ringtmp.errors import UsageError
from ringtmp.model.build import build_layers
from ringtmp.model.export import Exporter
from ringtmp.model.export_cache import DIGEST_BYTES, _digest, module_key
from ringtmp.model.portable_layer import Layer


def _layers(model: nn.Module, phases: list[str]) -> list[Layer]:
    return [each.layer for each in build_layers(model, 0, vectors(8), [2], phase=phases.append)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ringtmp" / "export"


def test_a_second_run_uses_what_was_exported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str] = []
    first = _layers(SharedBlock(), phases)
    assert "exporting the model" in phases
    monkeypatch.setattr(Exporter, "export", None)
    phases.clear()
    assert _layers(SharedBlock(), phases) == first
    assert "exporting the model" not in phases
    assert "comparing the model with eager mode" in phases, "it is compared all the same"


def test_a_refusal_for_too_few_cells_comes_at_once_and_forgets_nothing(folder: Path) -> None:
    def refuse(count: int, why: str) -> None:
        raise UsageError(f"{count} are too few")

    for exported in (True, False):
        phases: list[str] = []
        with pytest.raises(UsageError, match="are too few"):
            list(build_layers(SharedBlock(), 0, vectors(8), [2], refuse, phase=phases.append))
        assert ("exporting the model" in phases) is exported
        assert "comparing the model with eager mode" not in phases
        assert len(list(folder.iterdir())) == 1


def _other_activation(kept: Path) -> bytes:
    """Of a model with another activation, whole: the comparison with eager mode tells."""
    exported = kept.read_bytes()[DIGEST_BYTES:].replace(b"aten.tanh.default", b"aten.relu.default")
    return _digest(kept.name, exported) + exported


def _other_role(kept: Path) -> bytes:
    """The comparison of the whole with eager mode would not see it, and the cut would train something else."""
    flipped = kept.read_bytes().replace(b"\xa6copied\xc2", b"\xa6copied\xc3", 1)
    assert flipped != kept.read_bytes()
    return flipped


@pytest.mark.parametrize(
    "content", [lambda kept: b"", lambda kept: b"\x91" * 10_000, _other_role, _other_activation],
    ids=["empty", "nested", "role", "activation"],
)  # fmt: skip
def test_a_kept_export_that_is_damaged_or_another_models_is_forgotten(
    folder: Path, content: Callable[[Path], bytes]
) -> None:
    expected = _layers(SharedBlock(), [])
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(content(kept))
    phases: list[str] = []
    assert _layers(SharedBlock(), phases) == expected
    assert "exporting the model" in phases
    assert kept.read_bytes() == whole, "and written anew"


def test_another_attribute_shape_or_sample_is_another_module() -> None:
    def key(model: nn.Module, sample: Any) -> str:
        return module_key(model, sample, 0)

    sample = torch.zeros(3, 8)
    same = key(SharedBlock(), sample)
    assert key(SharedBlock(), sample) == same
    other = SharedBlock()
    other.rate = 0.5  # type: ignore[assignment]
    frozen = SharedBlock()
    frozen.first.weight.requires_grad_(False)
    tied = SharedBlock()
    tied.middle.weight = tied.shared.weight
    assert len({same, key(other, sample), key(frozen, sample), key(tied, sample), key(SharedBlock(), sample[:2])}) == 5

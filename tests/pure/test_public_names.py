"""What a user imports is in `ringtmp.__all__`, and described in docs/api.md."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringtmp
from ringtmp import errors

API = (Path(__file__).parents[2] / "docs/api.md").read_text()
#: Errors that are raised and caught inside: a run never ends with one.
INTERNAL = {"Misconduct", "SnapshotUnusable", "Unasked"}


@pytest.mark.parametrize("name", ringtmp.__all__)
def test_a_public_name_is_there_and_in_the_docs(name: str) -> None:
    assert getattr(ringtmp, name) is not None
    assert f"`{name}`" in API or f"`{name}(" in API


def test_every_error_a_run_can_end_with_is_public() -> None:
    kinds = {each.__name__ for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)}
    assert kinds - INTERNAL <= set(ringtmp.__all__)


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Rign'"):
        ringtmp.Rign  # noqa: B018

"""Batches that are dicts: the order of keys is that of the first, labels are targets, and every mistake is named."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ringtmp.data.batches import TrainingBatches, split_batch
from ringtmp.data.nested_inputs import arranged, leaves, map_tensors, names
from ringtmp.data.stream_store import Kept, read, write
from ringtmp.data.tables_and_streams import Stream, Table, from_python, with_loss
from ringtmp.errors import UsageError

IDS, MASK, LABELS = torch.arange(24).view(6, 4), torch.ones(6, 4), torch.arange(6)


def batch(**more: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS, **more}


def test_leaves_come_in_the_order_of_the_keys() -> None:
    inputs = UserDict({"b": IDS, "a": (MASK, {"c": LABELS})})
    assert names(inputs) == ("b", "a.0", "a.1.c")
    assert [each is other for each, other in zip(leaves(inputs), (IDS, MASK, LABELS), strict=True)] == [True] * 3
    assert map_tensors(lambda each: each, inputs) == {"b": IDS, "a": (MASK, {"c": LABELS})}
    turned = {"a": (MASK, {"c": LABELS}), "b": IDS}
    assert names(arranged(turned, names(inputs), "x")) == names(inputs)
    with pytest.raises(UsageError, match="the keys of inputs must be strings, not 1"):
        leaves({1: IDS})


def test_a_batch_of_dicts_is_split_and_kept(tmp_path: Path) -> None:
    pieces, targets = split_batch({"x": IDS, "y": {"z": MASK}}, LABELS, 4)
    assert [len(each["y"]["z"]) for each in pieces] == [len(each) for each in targets] == [2, 2, 1, 1]
    write(tmp_path / "a", 0, Kept(0, 0, 0, pieces[0], targets[0]))
    again = read(tmp_path / "a")
    assert again is not None
    assert names(again.inputs) == ("x", "y.z")
    assert again.inputs["x"].equal(IDS[:2])


def rows(order: tuple[str, ...] = ("input_ids", "attention_mask", "labels")) -> list[dict[str, torch.Tensor]]:
    whole = batch()
    turned = [order if row % 2 == 0 else order[::-1] for row in range(6)]
    return [{key: whole[key][row] for key in keys} for row, keys in enumerate(turned)]


class Rows:
    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def loader() -> Any:
    data: Any = rows()
    return DataLoader(data, batch_size=2)


@pytest.mark.parametrize("data", [batch(), UserDict(batch()), Rows(rows()), loader()])
def test_labels_stay_with_a_model_that_computes_its_loss_and_are_targets_for_any_other(data: Any) -> None:
    source, loss = with_loss(from_python(data), None)
    assert loss == "model"
    inputs, targets = source.example(2)
    assert names(inputs) == ("input_ids", "attention_mask", "labels")
    assert inputs["labels"].equal(targets)
    source, loss = with_loss(from_python(data), "cross_entropy")
    inputs, targets = source.example(2)
    assert (names(inputs), loss) == (("input_ids", "attention_mask"), "cross_entropy")
    assert targets.equal(LABELS[:2])
    assert with_loss(source, "cross_entropy")[0].example(1)[1].equal(LABELS[:1])  # asked again: the same
    taken = TrainingBatches(source, 2, 2, 0).batch(0)
    assert taken is not None
    assert names(taken.inputs[0]) == ("input_ids", "attention_mask")


def test_pairs_with_a_dict_of_inputs_are_a_table() -> None:
    table = from_python(({"x": IDS.numpy(), "y": MASK}, LABELS))
    assert isinstance(table, Table)
    assert (table.size, table.loss, table.shape.inputs, table.shape.outputs) == (6, "cross_entropy", (4,), 6)
    assert with_loss(table, None) == (table, "cross_entropy")


def test_lists_of_numbers_in_a_dataset_become_tensors() -> None:
    table = from_python(Rows([{"input_ids": [1, 2], "labels": 1}, {"input_ids": [3, 4], "labels": 0}]))
    inputs, targets = table.example(2)
    assert inputs["input_ids"].tolist() == [[1, 2], [3, 4]]
    assert targets.tolist() == [1, 0]


def test_a_stream_must_keep_its_keys() -> None:
    stream = Stream("s", [batch(), {"labels": LABELS, "input_ids": IDS, "attention_mask": MASK}, {"input_ids": IDS}])
    assert stream.next() is not None
    second = stream.next()
    assert second is not None
    assert names(second[0]) == ("input_ids", "attention_mask", "labels")
    with pytest.raises(UsageError, match="lacks 'attention_mask', 'labels': every batch must have 'input_ids'"):
        stream.next()


@pytest.mark.parametrize(
    ("data", "loss", "says"),
    [
        (batch(attention_mask=MASK[:3]), None, "different lengths: input_ids 6, attention_mask 3, labels 6, targets 6"),
        ({"input_ids": IDS}, None, "gives dicts without 'labels'"),
        ({"input_ids": IDS}, "mse", "gives dicts without 'labels'"),
        ({"labels": LABELS}, "mse", "has 'labels' and no inputs beside them"),
        (Rows([{"x": IDS, "text": "a", "labels": 1}]), None, "'text' of a sample is a str, not a tensor"),
        (Rows([{"x": IDS[0], "labels": 1}, {"x": IDS[0, :2], "labels": 1}]), None, "differ in shape in 'x': pad them"),
        (Rows([{"x": IDS[0], "labels": 1}, {"y": IDS[0], "labels": 1}]), None, "all must have the same keys"),
    ],
)
def test_mistakes_are_named(data: Any, loss: str | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        with_loss(from_python(data), loss)[0].example(2)


def test_a_model_may_compute_its_loss_without_labels() -> None:
    source, loss = with_loss(from_python({"x": MASK}), "model")
    inputs, targets = source.example(3)
    assert loss == "model"
    assert targets.equal(inputs["x"])

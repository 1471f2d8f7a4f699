"""The order of a loader's batches: it comes from the run's seed, repeats, resumes in the middle of an epoch, and is said not
to where that cannot be promised."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ringtmp import Ring, api
from ringtmp.data import source_registry
from ringtmp.data.batches import TrainingBatches, evaluation_batches
from ringtmp.data.tables_and_streams import from_python
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from test_healing import Death, Mortal, run
from test_training_loop import blobs, stack

SIZE = 20


class Plain(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index)]), torch.tensor(index % 2)


OF_MODULE = np.random.default_rng(8)


def drawn_elsewhere() -> float:
    return float(OF_MODULE.random())


def in_closure() -> Callable[[], float]:
    generator = random.Random(9)
    return lambda: generator.random()


class Noisy(Plain):
    """A transform that draws from everything there is."""

    def __init__(self) -> None:
        self.transforms = [np.random.default_rng(3), random.Random(3)]
        self.own = torch.Generator().manual_seed(5)
        self.hidden = in_closure()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = [
            float(torch.rand(())),
            random.random(),
            float(np.random.rand()),
            float(torch.rand((), generator=self.own)),
        ]
        drawn += [drawn_elsewhere(), self.hidden()]
        drawn += [float(each.random()) for each in self.transforms]  # type: ignore[attr-defined]
        return torch.tensor([float(index), *drawn]), torch.tensor(index % 2)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(Plain(), 4, shuffle=True),
    "drop_last": lambda: DataLoader(Plain(), 8, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(Plain(), 4, shuffle=True, generator=generator()),
    "with replacement": lambda: DataLoader(Plain(), 4, sampler=RandomSampler(Plain(), replacement=True, num_samples=10)),
    "sampler's generator": lambda: DataLoader(Plain(), 4, sampler=RandomSampler(Plain(), generator=generator())),
    "weighted": lambda: DataLoader(Plain(), 4, sampler=WeightedRandomSampler([1.0] * SIZE, 9)),
    "subset": lambda: DataLoader(Plain(), 4, sampler=SubsetRandomSampler(range(5, 15))),
    "batch sampler": lambda: DataLoader(Plain(), batch_sampler=BatchSampler(RandomSampler(Plain()), 3, drop_last=True)),
    "batches as samples": lambda: DataLoader(
        TensorDataset(torch.arange(20.0), torch.zeros(20)), None, sampler=BatchSampler(RandomSampler(Plain()), 5, False)
    ),
    "noisy": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "workers that persist": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=1, persistent_workers=True),
}  # fmt: skip


def disturb(seed: int) -> None:
    """What other code in the process may have done."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def read(batches: TrainingBatches, steps: range) -> list[list[Any]]:
    found = []
    for step in steps:
        batch = batches.batch(step)
        assert batch is not None
        found.append(
            [batch.epoch, *(piece.tolist() for piece in batch.inputs), *(each.tolist() for each in batch.targets)]
        )
        torch.rand(3)  # as layers do between two batches
    return found


def batches(loader: Any, seed: int = 1) -> TrainingBatches:
    return TrainingBatches(from_python(loader, seed=seed), 4, 2, seed)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.long if each == "workers" else []) for each in LOADERS]
)
def test_a_loaders_batches_depend_on_the_seed_alone_and_resume_within_an_epoch(name: str) -> None:
    make = LOADERS[name]
    disturb(1)
    loader = make()
    steps = range(len(loader) * 5 // 2)
    once = read(batches(loader), steps)
    disturb(2)
    assert read(batches(loader), steps) == once, "the same loader again"
    there = batches(make())
    assert read(there, steps) == once, "a new one"
    passes = {epoch: [each[1:] for each in once if each[0] == epoch] for epoch in (0, 1)}
    assert passes[0] != passes[1], "every epoch has an order of its own"

    half = len(steps) - 2
    disturb(3)
    resumed = batches(make())
    resumed.go_on(half, there.place(half))
    assert read(resumed, steps[half:]) == once[half:]
    assert not resumed.strays()
    if "own" not in name and "generator" not in name:
        assert read(batches(make(), seed=2), steps) != once


def test_the_order_is_that_of_a_plain_loop_that_begins_with_the_seed() -> None:
    disturb(7)
    expected = [x.flatten().tolist() for _ in range(2) for x, _ in DataLoader(Plain(), 4, shuffle=True)]
    disturb(8)
    found = read(batches(DataLoader(Plain(), 4, shuffle=True), seed=7), range(10))
    assert [[value[0] for piece in each[1:3] for value in piece] for each in found] == expected


def test_no_generator_is_changed_by_reading() -> None:
    def states() -> list[Any]:
        held = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]
        return [
            *held,
            own.get_state().tolist(),
            noisy.own.get_state().tolist(),
            noisy.transforms[1].getstate(),
            OF_MODULE.bit_generator.state,
        ]  # type: ignore[attr-defined]

    noisy, own = Noisy(), generator()
    before = states()
    source = batches(DataLoader(noisy, 4, shuffle=True, generator=own))
    for step in range(7):
        source.batch(step)
    table = batches(noisy)
    table.batch(0)
    list(evaluation_batches(from_python(DataLoader(noisy, 4, shuffle=True)), 4, 2))
    assert states() == before


def test_a_dataset_that_draws_is_a_pure_function_of_seed_and_step() -> None:
    disturb(1)
    forwards = read(batches(Noisy()), range(8))
    disturb(2)
    backwards = batches(Noisy())
    assert [read(backwards, range(step, step + 1))[0] for step in reversed(range(8))][::-1] == forwards
    assert forwards[0] != forwards[5], "the second epoch draws anew"
    assert read(batches(Noisy(), seed=2), range(8)) != forwards
    scores = [[each.inputs for each in evaluation_batches(from_python(Noisy()), 8, 1)] for _ in range(2)]
    assert all(a[0].equal(b[0]) for a, b in zip(*scores, strict=True))


def test_an_evaluation_that_was_cut_short_begins_again() -> None:
    source = from_python(DataLoader(Plain(), 4, shuffle=True))
    whole = [each.inputs[0].tolist() for each in evaluation_batches(source, 4, 1)]
    cut = evaluation_batches(source, 4, 1)
    next(cut)
    assert [each.inputs[0].tolist() for each in evaluation_batches(source, 4, 1)] == whole
    assert len(whole) == 5


class Guessing(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SIZE).tolist())

    def __len__(self) -> int:
        return SIZE


class Arriving(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([Plain()[index] for index in range(SIZE)])


class Other(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lambda: DataLoader(Plain(), 4, sampler=Guessing()), "Guessing, a sampler of your own"),
        (lambda: DataLoader(Plain(), batch_sampler=BatchSampler(Guessing(), 4, False)), "Guessing"),
        (lambda: DataLoader(Arriving(), 4), "Arriving, an IterableDataset"),
        (lambda: Other(Plain(), 4), "Other, a DataLoader of your own"),
        (lambda: DataLoader(Plain(), 4, num_workers=1, in_order=False), "in_order=False"),
        (lambda: ((torch.zeros(2, 1), torch.zeros(2)) for _ in range(3)), "generator"),
        (lambda: [(torch.zeros(2, 1), torch.zeros(2))] * 3, None),
        (lambda: DataLoader(Plain(), 4, sampler=[3, 1, 2, 0]), None),
        (lambda: DataLoader(Plain(), 4), None),
    ],
)
def test_what_nobody_can_promise_is_known(data: Callable[[], Any], why: str | None) -> None:
    found = batches(data()).not_ours
    assert found is None if why is None else (found is not None and why in found)


def test_a_loader_from_a_file_is_seeded_like_one_from_python(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "def data():\n"
        "    table = TensorDataset(torch.arange(20.0)[:, None], torch.zeros(20))\n"
        "    return DataLoader(table, 4, shuffle=True), DataLoader(table, 4, shuffle=True)\n"
    )
    found = []
    for disturbed, seed in ((1, 5), (2, 5), (1, 6)):
        disturb(disturbed)
        train, test = source_registry.load(f"{tmp_path / 'mine.py'}:data", seed, {})
        assert test is not None
        scored = [each.inputs[0].tolist() for each in evaluation_batches(test, 4, 1)]
        found.append((read(TrainingBatches(train, 4, 2, seed), range(7)), scored))
    assert found[0] == found[1]
    assert found[0] != found[2]


# -- whole runs -------------------------------------------------------------------------------------------------------


class Listening(api.Watcher):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def shuffling(**more: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*blobs(64)), 16, **{"shuffle": True, **more})


def test_two_runs_with_a_shuffling_loader_and_a_resumed_one_have_the_same_bits(tmp_path: Path) -> None:
    def fit(folder: str, steps: int, seed: int) -> api.Result:
        disturb(seed)
        before = torch.get_rng_state()
        model = stack()
        torch.set_rng_state(before)
        result = Ring(nodes=1).fit(
            model, shuffling(), steps=steps, microbatches=4, checkpoint_every=3, run_dir=tmp_path / folder, watcher=Listening()
        )  # fmt: skip
        assert torch.get_rng_state().equal(before), "the global generator is as it was"
        return result

    whole, other = fit("a", 10, 1), fit("b", 10, 2)
    assert whole.summary.exactness == "bits"
    assert whole.summary.weights_sha256 == other.summary.weights_sha256
    fit("c", 6, 3)
    disturb(4)
    told = Listening()
    resumed = Ring(nodes=1).resume(tmp_path / "c", shuffling(), steps=10, watcher=told)
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256
    assert (resumed.summary.exactness, told.warnings) == ("bits", [])


def test_cuts_and_losses_do_not_change_what_a_loader_gives(tmp_path: Path) -> None:
    class Shaken(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            inputs, label = super().__getitem__(index)
            return inputs + torch.rand(6), label

    def data(disturbed: int) -> Any:
        disturb(disturbed)
        return from_python(DataLoader(Shaken(*blobs(80)), 16, shuffle=True)), None

    alone = run(tmp_path / "alone", InMemoryPool(1), data=data(1))
    hit = run(tmp_path / "hit", Mortal(3, Death(1, 7)), data=data(2))
    assert len(hit.summary.recoveries) == 1
    assert hit.summary.weights_sha256 == alone.summary.weights_sha256
    assert hit.summary.exactness == "bits"


def test_an_order_that_is_not_ours_is_said_and_resuming_warns(tmp_path: Path) -> None:
    class Own(RandomSampler):
        """Whatever it draws from."""

    def loader() -> DataLoader[Any]:
        return shuffling(shuffle=False, sampler=Own(blobs(64)[0]))

    told = Listening()
    ring = Ring(nodes=1)
    first = ring.fit(stack(), loader(), steps=3, microbatches=4, run_dir=tmp_path / "run", watcher=told)
    assert (first.summary.exactness, told.warnings) == ("stream", [])
    assert ring.resume(tmp_path / "run", loader(), steps=5, watcher=told).summary.exactness == "stream"
    (warning,) = told.warnings
    assert "a sampler of your own: their order cannot be reproduced" in warning


def test_resuming_with_other_batches_is_noticed_and_never_called_exact_again(tmp_path: Path) -> None:
    ring, told = Ring(nodes=1), Listening()
    ring.fit(stack(), shuffling(), steps=3, microbatches=4, run_dir=tmp_path / "run", watcher=told)
    other = shuffling(generator=torch.Generator().manual_seed(99))
    resumed = ring.resume(tmp_path / "run", other, steps=5, watcher=told)
    assert resumed.summary.exactness == "stream"
    (warning,) = told.warnings
    assert "gives other batches than before" in warning
    (stray,) = [each for each in events.read(tmp_path / "run/events.jsonl") if isinstance(each, events.StreamStrayed)]
    assert stray.step == 3
    again = ring.resume(tmp_path / "run", other, steps=7, watcher=told)
    assert again.summary.exactness == "stream"
    assert len(told.warnings) == 1


def test_a_resumed_loader_with_another_batch_size_is_refused(tmp_path: Path) -> None:
    data, ring = TensorDataset(*blobs(64)), Ring(nodes=1, progress=False)
    ring.fit(stack(), DataLoader(data, 16), epochs=1, microbatches=4, run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="gives batches of 8, where the run had batches of 16"):
        ring.resume(tmp_path / "run", DataLoader(data, 8), epochs=2)


def test_a_resumed_loader_with_more_data_still_trains_its_epoch(tmp_path: Path) -> None:
    ring = Ring(nodes=1, progress=False)
    ring.fit(stack(), DataLoader(TensorDataset(*blobs(64)), 16), epochs=1, microbatches=4, run_dir=tmp_path / "run")
    longer = DataLoader(TensorDataset(*blobs(128)), 16)
    assert ring.resume(tmp_path / "run", longer, epochs=2).summary.steps == 16


def test_data_that_ends_before_the_steps_do_is_said(tmp_path: Path) -> None:
    told = Listening()
    inputs, labels = blobs(64)
    pieces = ((inputs[at : at + 16], labels[at : at + 16]) for at in range(0, 64, 16))
    result = Ring(nodes=1).fit(stack(), pieces, steps=9, microbatches=4, run_dir=tmp_path / "run", watcher=told)
    assert result.summary.steps == 4
    assert told.warnings == ["the data ended after 4 of 9 steps"]


def test_a_last_batch_too_small_for_a_batch_norm_is_left_out_where_the_data_is_read_once(tmp_path: Path) -> None:
    told = Listening()
    inputs, labels = blobs(36)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))

    def pieces() -> Iterator[Any]:
        return ((inputs[at : at + 16], labels[at : at + 16]) for at in range(0, 36, 16))

    result = Ring(nodes=1).fit(model, pieces(), microbatches=4, run_dir=tmp_path / "run", watcher=told)
    assert result.summary.steps == 2
    (warning,) = told.warnings
    assert "the batch of step 3 has 4 samples" in warning
    assert "left out, number 4 so far" in warning
    with pytest.raises(UsageError, match="the batch of step 3 has 4 samples.*drop_last=True"):
        Ring(nodes=1, progress=False).fit(model, list(pieces()), epochs=1, microbatches=4, run_dir=tmp_path / "again")

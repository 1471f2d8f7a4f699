"""What is refused of a whole module, before anything starts: the model is named, the user's line, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.blocks import patterns_of
from ringtmp.model.build import build_layers
from ringtmp.model.build_cells import Cutting
from ringtmp.runtime.losses import check_loss, loss_named

WIDTH = 8


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class Branching(Part):
    def forward(self, x: torch.Tensor) -> Any:
        if x.sum() > 0:
            return self.inner(x)
        return x


class Looping(Part):
    def forward(self, x: torch.Tensor) -> Any:
        while x.abs().max() > 1:
            x = x / 2
        return self.inner(x)


class Number(Part):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * x.max().item()


class Printing(Part):
    def forward(self, x: torch.Tensor) -> Any:
        print(f"{x.mean():.2f}")
        return self.inner(x)


class ByNumpy(Part):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * torch.from_numpy(x.detach().numpy())


class Unlisted(Part):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) + torch.linalg.matrix_exp(x[:, :, None] * x[:, None]).sum(-1)


class Choosing(Part):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)[x[:, 0] > 0]


class Complex(Part):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.fft.fft(self.inner(x)).abs()


class Counting(Part):
    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.inner(x) * (1.0 if self.calls < 1000 else 2.0)


class Model(nn.Module):
    """A part between two others."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.part(torch.tanh(self.first(x))))


class Silent(Part):
    def forward(self, x: torch.Tensor) -> Any:
        self.inner(x)


class Words(Part):
    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.inner(x), "said": "yes"}


class Sparse(Part):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(self.table((x > 0).long()).sum(1))


HERE = r"test_refused_modules\.py:\d+: "
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a branch": (lambda: Model(Branching()), rf"the model \(Model\) .*branches on the values .* \({HERE}if x.sum\(\) > 0:\)"),
    "a loop": (lambda: Model(Looping()), rf"the model \(Model\) .* \({HERE}while x.abs\(\)"),
    "a number": (lambda: Model(Number()), rf"into a number in part \({HERE}return self.inner\(x\) \* x.max.*: keep it as a"),
    "printing": (lambda: Model(Printing()), rf"the model \(Model\) cannot be exported: .* \({HERE}print\("),
    "NumPy": (lambda: Model(ByNumpy()), rf"the model \(Model\) cannot be exported: .*numpy.* \({HERE}return self.inner"),
    "an operator": (lambda: Model(Unlisted()), rf"operator aten.linalg_matrix_exp.default in part \({HERE}return"),
    "a size": (lambda: Model(Choosing()), rf"whose size depends on the values of another in part \({HERE}return .*torch.where"),
    "a complex operator": (lambda: Model(Complex()), rf"the model \(Model, training\) uses .*fft.* in part \({HERE}return"),
    "a counter": (lambda: Model(Counting()), r"the model \(Model\) changes its attribute .*calls .*register_buffer"),
    "nothing": (Silent, r"the model \(Silent\) returns None: return a tensor"),
    "words": (Words, r"the model \(Words\) returns a str in 'said'"),
    "sparse gradients": (Sparse, r"the model \(Sparse\) asks embedding for sparse gradients, .*use sparse=False"),
    "complex weights": (lambda: Model(nn.Linear(8, 8, dtype=torch.complex64)), "^part.weight is complex, .*two tensors"),
    "a lazy module": (lambda: Model(nn.LazyLinear(WIDTH)), "^part.weight is lazy .*run the model once on a sample first"),
    "another device": (lambda: Model(Part()).to("meta"), "^first.weight is on meta: move the model to the CPU first"),
    "nothing made": (lambda: None, "^the function that makes the model returned nothing"),
    "half precision": (lambda: nn.Linear(8, 3).half(), r"The data is float32 and the weights are float16: use model.float\(\)"),
    "a shape": (lambda: nn.Linear(9, 3), r"the model \(Linear\) refuses a microbatch of shape \(2, 8\): mat1 and mat2 .*Check"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_that_cannot_be_taken_is_refused_with_the_reason_and_the_line(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    make, says = REFUSED[kind]
    with pytest.raises(UsageError, match=says) as refused:
        list(build_layers(make(), 0, rows, [2]))
    assert "layer" not in str(refused.value)
    assert "def forward" not in capfd.readouterr().err


def test_a_token_beyond_the_table_is_told_with_both_numbers() -> None:
    """Torch says "index out of range in self", and it is not the shape of the data."""
    model = nn.Sequential(nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30))
    with pytest.raises(
        UsageError, match=r"the number 47, and these tables have fewer rows: .*\(30\)\. Tokens of another"
    ):
        list(build_layers(model, 0, lambda count: torch.full((count, 5), 47), [2]))


class Overlapping(nn.Module):
    """The second block changes in place what the first was given a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        half = y[:, :3]
        x = self.blocks[1](self.blocks[0](x))
        y.mul_(2)
        return self.blocks[2](x)[:, :3] + half


def test_blocks_between_which_something_is_changed_in_place_are_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"between the blocks blocks.0 and blocks.1, because a tensor is changed in place"
    ):
        list(build_layers(Overlapping(), 0, rows, [2], cutting=Cutting(patterns_of("blocks.*"))))
    assert len(list(build_layers(Overlapping(), 0, rows, [2]))) == 2


def test_outputs_that_a_named_loss_would_leave_out_are_refused() -> None:
    outputs = (torch.zeros(4, 3), torch.zeros(4, 3))
    with pytest.raises(UsageError, match="output"):
        check_loss(loss_named("cross_entropy"), "cross_entropy", outputs, torch.zeros(4, dtype=torch.long))

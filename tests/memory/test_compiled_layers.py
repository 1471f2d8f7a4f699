"""Layers handed to torch.compile: the bits of one process whose layers are compiled so, whatever the cut."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor import cpp_builder
from torch.nn import functional as F

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ringtmp.config import RingPart, RunConfig, TrainingPart
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.model import compiled_graph, operator_contracts
from ringtmp.model.compiled_graph import Piece, compilable, refuse_without_compiler
from ringtmp.model.export import Exporter
from ringtmp.model.run_graph import Program
from ringtmp.run.check_settings import resolve

BATCH, STEPS, PARTS = 8, 2, 2


class Block(nn.Module):
    """Operators before, between and behind two that draw random numbers, and buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back, self.norm = nn.Linear(12, 24), nn.Linear(24, 12), nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(F.gelu(self.wide(x)), 0.3, self.training)
        return x + F.dropout(torch.tanh(self.norm(self.back(y))), 0.1, self.training)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(count))


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(), nn.Linear(12, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(BATCH, 12, generator=generator), torch.arange(BATCH) % 3) for _ in range(STEPS)]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operators every run of a compiled piece stood for."""
    found: list[int] = []
    extend = Piece.extend

    def counted(self: Piece, values: list[Any]) -> None:
        found.append(self.operators)
        extend(self, values)

    monkeypatch.setattr(Piece, "extend", counted)
    return found


def test_every_cut_and_recomputing_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[int]
) -> None:
    """With operators that are compiled to themselves, whatever compiler there is."""
    monkeypatch.setattr(compiled_graph, "BACKEND", "aot_eager")
    built = Built(tmp_path, model(), rows, [BATCH // PARTS])
    plain = model()
    losses = plain_loop(plain, batches(), PARTS, F.cross_entropy, lambda each: torch.optim.SGD(each, lr=0.1))
    for nodes, recompute in [(1, "none"), (3, "all")]:
        how = recipe(compiled=True)
        found = ring_in_memory(built, how, batches(), PARTS, F.cross_entropy, nodes, recompute=recompute)
        assert found == (state_sha256(plain), losses), (nodes, recompute)
    assert len(ran) >= 7 * STEPS * PARTS, "a block in three pieces, and four layers"
    assert max(ran) > 2


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_one_to_three_nodes_have_the_bits_of_one_process_with_compiled_layers(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.LayerNorm(12)) for _ in range(3)))
    built = Built(tmp_path, copy.deepcopy(plain), rows, [BATCH // PARTS])
    eager = ring_in_memory(built, recipe(), batches(), PARTS, F.cross_entropy, 2)
    layers = [each for block in plain for each in block]
    compiled = nn.Sequential(*(torch.compile(each, fullgraph=True, dynamic=False) for each in layers))
    sgd = lambda each: torch.optim.SGD(each, lr=0.1)  # noqa: E731
    # Seeded by layer: nothing draws here, and torch.compile does not follow the mode that seeds operators.
    losses = plain_loop(compiled, batches(), PARTS, F.cross_entropy, sgd, randomness="layer")
    for nodes in (1, 2, 3):
        found = ring_in_memory(built, recipe(compiled=True), batches(), PARTS, F.cross_entropy, nodes)
        assert found == (state_sha256(plain), losses), nodes
    assert eager[1] == pytest.approx(losses, rel=1e-5)


def test_layers_with_code_of_their_own_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, ran: list[int]) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 3

    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Twice.apply(x).tanh()

    layer, _ = Exporter().export("own", Own(), rows(3))
    assert not compilable(layer.train)
    x = rows(3).requires_grad_()
    (found,) = Program(layer.train, compiled=True).run([x], {})
    found.sum().backward()
    assert torch.allclose(x.grad, 3 * (1 - found.detach() ** 2))
    assert not ran


def test_a_stream_may_have_more_sizes_than_torch_compiles_by_itself(
    monkeypatch: pytest.MonkeyPatch, ran: list[int]
) -> None:
    monkeypatch.setattr(compiled_graph, "BACKEND", "aot_eager")
    torch.manual_seed(1)
    module = nn.Linear(12, 3)
    layer, tensors = Exporter().export("linear", module, rows(3))
    program = Program(layer.train, compiled=True)
    for count in range(2, 13):
        (found,) = program.run([rows(count)], tensors)
        assert torch.equal(found, module(rows(count)))
    assert len(ran) == 11


def test_what_cannot_be_compiled_is_refused_before_anything_starts() -> None:
    def given(schedule: Any = "auto", **training: Any) -> RunConfig:
        return resolve(RunConfig(training=TrainingPart(compile=True, **training), ring=RingPart(schedule=schedule)))

    assert given().ring.schedule == "1f1b", "zero-bubble is not chosen"
    assert given().training.numeric_mode == "float32, compiled layers"
    assert given(compute="bfloat16").training.numeric_mode == "bfloat16 compute, compiled layers"
    with pytest.raises(UsageError, match="--schedule zero-bubble takes backward passes apart"):
        given("zero-bubble")
    with pytest.raises(UsageError, match="--frozen-as int8 converts weights"):
        given(frozen_as="int8")
    cpp_builder.get_cpp_compiler.cache_clear() if hasattr(cpp_builder.get_cpp_compiler, "cache_clear") else None
    without = inductor.patch({"cpp.cxx": ("no-such-compiler",)})  # set and taken back as an attribute it would be gone
    with without, pytest.raises(UsageError, match="needs a C\\+\\+ compiler"):
        refuse_without_compiler()


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * 2).view(-1, 3, 2, 2).unbind(1)
        return x + F.scaled_dot_product_attention(q, k, v).flatten(1).repeat(1, 3)


def test_attention_is_compiled_and_its_arguments_are_looked_at_once_for_every_size(
    monkeypatch: pytest.MonkeyPatch, ran: list[int]
) -> None:
    monkeypatch.setattr(compiled_graph, "BACKEND", "aot_eager")
    looked: list[tuple[int, ...]] = []
    name = "aten.scaled_dot_product_attention.default"
    contract = operator_contracts.CONTRACTS[name]

    def counted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> None:
        looked.append(tuple(query.shape))
        contract(query, key, value, *rest, **named)

    monkeypatch.setitem(operator_contracts.CONTRACTS, name, counted)
    layer, _ = Exporter().export("attention", Attention(), rows(3))
    program = Program(layer.train, compiled=True)
    for count in (4, 4, 5):
        (found,) = program.run([rows(count)], {})
        assert torch.equal(found, Attention()(rows(count)))
    assert len(ran) == 3
    assert looked == [(4, 2, 2), (5, 2, 2)]


def test_arguments_that_break_a_contract_are_refused_before_compiled_code_sees_them(
    monkeypatch: pytest.MonkeyPatch, ran: list[int]
) -> None:
    monkeypatch.setattr(compiled_graph, "BACKEND", "aot_eager")
    layer, _ = Exporter().export("attention", Attention(), rows(3))
    ops = [
        msgspec.structs.replace(op, args=(op.args[0], op.args[1], layer.train.ops[0].args[0], *op.args[3:]))
        if op.target == "aten.scaled_dot_product_attention.default"
        else op
        for op in layer.train.ops
    ]
    program = Program(msgspec.structs.replace(layer.train, ops=tuple(ops)), compiled=True)
    assert program._pieces
    with pytest.raises(ProtocolError, match="attention: query"):
        program.run([rows(4)], {})

"""Our fused optimizers give the bits of torch's, whatever the settings, and know when to refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringtmp.api import Result, Ring
from ringtmp.config import RunConfig, TrainingPart
from ringtmp.errors import UsageError
from ringtmp.run.check_settings import resolve
from ringtmp.run.healing import memory_need
from ringtmp.runtime.learning_rates import RATE_SCHEDULES, RateSchedule, checked_schedule, learning_rate
from ringtmp.runtime.optimizers import (
    OPTIMIZERS,
    Setting,
    UpdateRule,
    checked_optimizer,
    delay_warning,
    make_optimizer,
    state_tensors,
)
from ringtmp.strategies.ring.exchange_snapshots import checkpoint_bytes
from ringtmp.wire.messages import Recipe

CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("sgd", {}, torch.optim.SGD),
    ("sgd", {"momentum": 0.9}, torch.optim.SGD),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, torch.optim.SGD),
    ("sgd", {"momentum": 0.5, "dampening": 0.1}, torch.optim.SGD),
    ("adam", {}, torch.optim.Adam),
    ("adam", {"weight_decay": 0.02, "amsgrad": True}, torch.optim.Adam),
    ("adamw", {}, torch.optim.AdamW),
    ("adamw", {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}, torch.optim.AdamW),
    ("adagrad", {}, torch.optim.Adagrad),
    ("adagrad", {"lr_decay": 0.1, "weight_decay": 0.01, "eps": 1e-8}, torch.optim.Adagrad),
]


@pytest.mark.parametrize(("name", "settings", "theirs"), CASES)
def test_ten_steps_give_torchs_bits(name: str, settings: dict[str, Any], theirs: Any) -> None:
    torch.manual_seed(0)
    shapes = [(5, 7), (3,), (2, 3, 4), (1000,)]
    mine = [torch.randn(shape, requires_grad=True) for shape in shapes]
    other = [each.detach().clone().requires_grad_() for each in mine]
    full = checked_optimizer(name, {**settings, "lr": 0.03})
    ours = make_optimizer(name, full, mine)
    options = {key: value for key, value in settings.items() if not key.startswith("beta")}
    if "beta1" in settings:
        options["betas"] = (settings["beta1"], settings["beta2"])
    torchs = theirs(other, lr=0.03, fused=True, **options)
    for step in range(10):
        for a, b in zip(mine, other, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        rate = 0.03 / (step + 1)
        torchs.param_groups[0]["lr"] = rate
        ours.step(rate)
        torchs.step()
        assert all(a.equal(b) for a, b in zip(mine, other, strict=True))
    for position, parameter in enumerate(other):
        theirs_state = {key: value for key, value in torchs.state[parameter].items() if value is not None}
        assert set(ours.states[position]) == set(theirs_state)


class Lion(torch.optim.Optimizer):
    """As its authors wrote it down."""

    def __init__(self, parameters: Any, lr: float, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for each in group["params"]:
                if each.grad is None:
                    continue
                mean = self.state[each].setdefault("exp_avg", torch.zeros_like(each))
                each.mul_(1 - group["lr"] * group["weight_decay"])
                each.add_(torch.sign(mean * beta1 + each.grad * (1 - beta1)), alpha=-group["lr"])
                mean.copy_(mean * beta2 + each.grad * (1 - beta2))


class Both:
    """Two optimizers of torch, each for its own parameters."""

    def __init__(self, *optimizers: torch.optim.Optimizer | None) -> None:
        self.optimizers = [each for each in optimizers if each is not None]
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()


def theirs_of(name: str, settings: dict[str, Any], matrices: list[torch.Tensor], others: list[torch.Tensor]) -> Any:
    if name == "nadam":
        return torch.optim.NAdam([*matrices, *others], foreach=False, **settings)
    if name == "lion":
        return Lion([*matrices, *others], **settings)
    of_adamw = {"lr": settings["lr"], "weight_decay": settings.get("weight_decay", 0.1)}
    adjust = "original" if settings.get("match_adamw") is False else "match_rms_adamw"
    of_muon = {key: value for key, value in settings.items() if key != "match_adamw"}
    return Both(
        torch.optim.Muon(matrices, adjust_lr_fn=adjust, **of_muon), torch.optim.AdamW(others, fused=True, **of_adamw)
    )


@pytest.mark.parametrize(("name", "settings"), [
    ("nadam", {}), ("nadam", {"betas": (0.99, 0.95), "weight_decay": 0.02, "eps": 1e-6, "momentum_decay": 0.1}),
    ("nadam", {"weight_decay": 0.02, "decoupled_weight_decay": True}),
    ("lion", {}), ("lion", {"betas": (0.95, 0.98), "weight_decay": 0.3}),
    ("muon", {}), ("muon", {"match_adamw": False, "momentum": 0.8, "nesterov": False, "weight_decay": 0.0}),
])  # fmt: skip
def test_ten_steps_give_the_bits_of_the_reference(name: str, settings: dict[str, Any]) -> None:
    """Tall, wide and square matrices, and what is none."""
    torch.manual_seed(0)
    shapes = [(5, 7), (40, 24), (16, 16), (3,), (2, 3, 4), (1000,), (9, 9)]
    hidden = [True, True, True, False, False, False, False]  # the last as a table would be
    mine = [torch.randn(shape, requires_grad=True) for shape in shapes]
    other = [each.detach().clone().requires_grad_() for each in mine]
    given = {"lr": 0.03, **settings}
    ours = make_optimizer(name, checked_optimizer(name, given), mine, hidden)
    reference = theirs_of(name, given, other[:3], other[3:])
    for step in range(10):
        for a, b in zip(mine, other, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        rate = 0.03 / (step + 1)
        for group in reference.param_groups:
            group["lr"] = rate
        ours.step(rate)
        reference.step()
        assert all(a.equal(b) for a, b in zip(mine, other, strict=True)), step
    kept = sum(value.nbytes for state in ours.states for value in state.values() if value.dim())
    assert kept == ours.state_bytes


@pytest.mark.parametrize(("name", "settings", "tensors"), [
    ("sgd", {}, 0), ("sgd", {"momentum": 0.9}, 1), ("adam", {}, 2), ("adamw", {"weight_decay": 0.1}, 2),
    ("adagrad", {}, 1), ("adam", {"amsgrad": True}, 3), ("adamw", {"amsgrad": True}, 3),
    ("nadam", {}, 2), ("lion", {}, 1),
])  # fmt: skip
def test_what_every_forecast_counts_is_what_the_optimizer_keeps(
    name: str, settings: dict[str, Any], tensors: int
) -> None:
    parameter = torch.ones(1000, requires_grad=True)
    parameter.grad = torch.ones(1000)
    optimizer = make_optimizer(name, checked_optimizer(name, settings), [parameter])
    optimizer.step(0.1)
    kept = [key for key, value in optimizer.states[0].items() if value.shape == parameter.shape]
    assert len(kept) == tensors == state_tensors(name, settings)
    assert set(optimizer.states[0]) == set(OPTIMIZERS[name].kept(settings))
    recipe = Recipe(0, 1, name, settings, {})
    for trained in (1000, 10, 0):  # the others are frozen
        layer: Any = SimpleNamespace(parameters=1000, trained=trained)
        assert memory_need([layer], name, settings, nodes=2) == 4000 + 4 * trained * (1 + tensors)
        assert checkpoint_bytes([layer], recipe) == 4000 + 4 * trained * 2 * tensors


def test_an_optimizer_in_one_entry_is_known_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain descent with a sign: facts in one place, and a run trains with it."""

    def update(changed: Any, gradients: Any, states: Any, *, first: bool, lr: float, scale: float) -> None:
        for parameter, gradient, state in zip(changed, gradients, states, strict=True):
            state["seen"] = gradient.clone() if first else state["seen"] + gradient
            parameter.sub_(lr * scale * gradient.sign())

    rule = UpdateRule(
        "sign", {"lr": Setting(0.5), "scale": Setting(2.0, low=1.0)}, {"seen": ""}, delay_limit=1.0, update=update
    )
    monkeypatch.setitem(OPTIMIZERS, "sign", rule)
    with pytest.raises(UsageError, match=r"sign: scale=0.5 must be a finite number of at least 1"):
        checked_optimizer("sign", {"scale": 0.5})
    config = resolve(RunConfig(training=TrainingPart(optimizer="sign")))
    assert config.training.optimizer_settings == {"lr": 0.5}
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = torch.tensor([3.0, -4.0])
    optimizer = make_optimizer("sign", {"lr": 0.5}, [parameter])
    optimizer.step(0.5)
    assert parameter.tolist() == [-1.0, 1.0]
    assert state_tensors("sign", {}) == 1
    assert optimizer.states[0]["seen"].equal(parameter.grad)


def test_settings_are_checked_without_loading_torch() -> None:
    check = (
        "import sys; from ringtmp.runtime.optimizers import checked_optimizer; from ringtmp.runtime import learning_rates;"
        "checked_optimizer('adam', {}); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    first, second = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = make_optimizer("sgd", {"momentum": 0.9}, [first, second])
    first.grad = torch.ones(3)
    optimizer.step(0.1)
    second.grad = torch.ones(3)
    optimizer.step(0.1)  # momentum of the second begins here
    assert second.tolist() == pytest.approx([0.9] * 3)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("sgdd", {}, "did you mean 'sgd'"),
        ("sgd", {"lr": float("nan")}, "lr=nan"),
        ("sgd", {"nesterov": True}, "nesterov needs a momentum"),
        ("sgd", {"momentum": "high"}, "must be a number"),
        ("adam", {"beta1": 1.0}, "beta1=1.0 must be at least 0 and below 1"),
        ("adam", {"momentum": 0.9}, "unknown setting of adam 'momentum'"),
        ("nadam", {"amsgrad": True}, "unknown setting of nadam 'amsgrad'"),
        ("muon", {"momentum": 1.0}, "muon: momentum=1.0 must be at least 0 and below 1"),
        ("muon", {"match_adamw": 0.2}, "match_adamw=0.2 must be yes or no"),
        ("lion", {"eps": 1e-8}, "unknown setting of lion 'eps'"),
    ],
)
def test_wrong_settings_are_refused(name: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        checked_optimizer(name, settings)


def test_learning_rates_are_plain_functions_of_the_step() -> None:
    cosine = checked_schedule({"kind": "cosine", "warmup": 2, "floor": 0.1}, 12)
    rates = [learning_rate(cosine, 1.0, step) for step in range(14)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.55)
    assert rates[12] == rates[13] == pytest.approx(0.1)
    stepped = checked_schedule({"kind": "step", "every": 5, "factor": 0.1}, None)
    assert [learning_rate(stepped, 1.0, step) for step in (0, 4, 5, 10)] == pytest.approx([1, 1, 0.1, 0.01])


def test_a_learning_rate_schedule_in_one_entry_is_checked_and_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    halving = RateSchedule("halving", {"warmup": 0, "every": None}, lambda given, step: 0.5 ** (step // given["every"]))
    monkeypatch.setitem(RATE_SCHEDULES, "halving", halving)
    with pytest.raises(UsageError, match="schedule halving needs every=N"):
        checked_schedule({"kind": "halving"}, None)
    full = checked_schedule({"kind": "halving", "every": 2, "warmup": 1}, None)
    assert [learning_rate(full, 1.0, step) for step in range(5)] == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_a_node_does_not_load_torchs_compiler() -> None:
    check = (
        "import sys, torch, ringtmp.runtime.worker, ringtmp.transport.zeromq; from ringtmp.system.resources import set_threads;"
        "from ringtmp.runtime.optimizers import OPTIMIZERS, make_optimizer; set_threads(1);"
        "p = torch.ones(2, requires_grad=True); p.grad = torch.ones(2);"
        "w = torch.ones(2, 2, requires_grad=True); w.grad = torch.ones(2, 2);"
        "[make_optimizer(name, {}, [p, w], [False, True]).step(0.1) for name in OPTIMIZERS];"
        "x = torch.ones(2, requires_grad=True); from ringtmp.runtime.gradients_at_segment_edges import run_backward;"
        "run_backward([x * p], [p]);"
        "assert torch.are_deterministic_algorithms_enabled();"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_on_a_parabola_a_delay_lowers_the_largest_stable_rate_as_the_warning_says(momentum: float) -> None:
    def grows(lr: float, delay: int) -> bool:
        weights, velocity = [1.0, 1.0], 0.0
        for _ in range(2000):
            velocity = momentum * velocity + weights[-1 - delay]  # curvature 1
            weights.append(weights[-1] - lr * velocity)
        return not all(abs(each) <= 1.0 for each in weights[-50:])  # beyond the largest number there is none

    plain, delayed = 2 * (1 + momentum), 1 - momentum
    assert [grows(0.97 * plain, 0), grows(1.03 * plain, 0)] == [False, True]
    assert [grows(0.97 * delayed, 1), grows(1.03 * delayed, 1)] == [False, True]


def test_a_rate_at_which_delayed_training_collapsed_is_warned_of() -> None:
    assert delay_warning("sgd", {"lr": 0.1, "momentum": 0.9}, staleness=0) is None
    assert delay_warning("sgd", {"lr": 0.1}, staleness=1) is None
    assert delay_warning("adam", {"lr": 0.002}, staleness=1) is None
    said = delay_warning("sgd", {"lr": 0.1, "momentum": 0.9}, staleness=1) or ""
    assert "lr 0.1 and momentum 0.9, which act as 1" in said
    assert "smaller --lr or momentum, or --staleness 0" in said
    assert "lr 3:" in (delay_warning("sgd", {"lr": 3.0}, staleness=1) or "")
    assert delay_warning("muon", {"lr": 0.03, "momentum": 0.95}, staleness=1) is None  # a mean, not a sum
    assert "adamw, lr 0.1" in (delay_warning("adamw", {"lr": 0.1}, staleness=1) or "")


def test_a_run_warns_of_the_delay_once(tmp_path: Path) -> None:
    settings = ("sgd", {"lr": 0.1, "momentum": 0.9})
    result = Ring(1).fit("mlp", "digits", steps=1, staleness=1, optimizer=settings, run_dir=tmp_path / "run")
    assert sum("seen to collapse" in text for text in result.summary.warnings) == 1
    Ring(1).resume(tmp_path / "run", steps=2)
    assert sum("seen to collapse" in text for text in Result(tmp_path / "run").summary.warnings) == 1

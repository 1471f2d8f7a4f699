"""Our fused optimizers give the bits of torch's, whatever the settings, and know when to refuse."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from ringtmp.errors import UsageError
from ringtmp.ring.optimizer import make_optimizer
from ringtmp.ring.recipe import checked_optimizer, checked_schedule, learning_rate

CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("sgd", {}, torch.optim.SGD),
    ("sgd", {"momentum": 0.9}, torch.optim.SGD),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, torch.optim.SGD),
    ("sgd", {"momentum": 0.5, "dampening": 0.1}, torch.optim.SGD),
    ("adam", {}, torch.optim.Adam),
    ("adam", {"weight_decay": 0.02, "amsgrad": True}, torch.optim.Adam),
    ("adamw", {}, torch.optim.AdamW),
    ("adamw", {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}, torch.optim.AdamW),
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


def test_a_node_does_not_load_torchs_compiler() -> None:
    check = (
        "import sys, torch, ringtmp.ring.worker, ringtmp.transport.zeromq; from ringtmp.resources import set_threads;"
        "from ringtmp.ring.optimizer import make_optimizer; set_threads(1);"
        "p = torch.ones(2, requires_grad=True); p.grad = torch.ones(2); make_optimizer('adam', {}, [p]).step(0.1);"
        "x = torch.ones(2, requires_grad=True); from ringtmp.ring.edges import run_backward; run_backward([x * p], [p]);"
        "assert torch.are_deterministic_algorithms_enabled();"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "[]\n"

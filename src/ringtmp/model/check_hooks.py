"""What `torch.export` does not see and would leave out without a word: hooks, and branches on the number of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.custom_backward import where
from ringtmp.model.name_in_errors import Subject


def refuse_hooks(subject: Subject, module: nn.Module) -> None:
    """Refuse hooks whose effect cannot travel. Forward hooks are part of the forward pass; hooks on parameters are exported."""
    everywhere = torch.nn.modules.module
    tables: list[tuple[str, Mapping[Any, Any]]] = [
        ("a global backward hook", everywhere._global_backward_hooks),
        ("a global backward pre-hook", everywhere._global_backward_pre_hooks),
    ]
    for path, each in module.named_modules():
        tables.append((f"a backward hook on {path or 'itself'}", each._backward_hooks))
        tables.append((f"a backward pre-hook on {path or 'itself'}", each._backward_pre_hooks))
    for local, parameter in module.named_parameters():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        tables.append((f"a hook after the gradient of {local}", after))
    for what, table in tables:
        for hook in table.values():
            raise UsageError(
                f"{subject} has {what} ({where(hook)}), which would not run on the node that runs the layer: "
                "remove it, or write it as a torch.autograd.Function or a parameter's hook (register_hook)"
            )


def refuse_narrow(label: str, size: Any, limits: Mapping[Any, Any], branches: Sequence[str]) -> None:
    """`size`: the number of samples as export knows it, `limits` what it found it may be. A branch shows as a limit."""
    allowed = limits.get(size.node.expr)
    if allowed is None or (allowed.lower <= 2 and allowed.upper >= 10**6):
        return
    bound = f"at least {allowed.lower}" if allowed.lower > 2 else f"at most {allowed.upper}"
    raise UsageError(
        f"{label} branches on the number of samples{lines(branches)}, and the example took only the branch for {bound}: "
        "it must do the same for any number of samples"
    )


def lines(branches: Sequence[str]) -> str:
    return f" ({', '.join(dict.fromkeys(branches))})" if branches else ""


def refuse_averaging(subject: Subject, module: nn.Module) -> None:
    for path, each in module.named_modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.momentum is None and each.track_running_stats:
            what = f"has a BatchNorm ({path})" if path else "is a BatchNorm"
            raise UsageError(
                f"{subject} {what} with momentum=None, which makes a tensor into a number at every step "
                "and cannot be exported: write momentum=0.1, or track_running_stats=False"
            )

"""Whether an operation's arguments are of the kinds its operator declares: asked once, before a graph may run.

Torch is generous: it takes a number for a dtype and looks it up in a table without asking whether it is there, and a
plain string for a device. A graph says a dtype, a layout, a memory format or a device by name or not at all; switches
are constants; the node's own generator is the only one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ringtmp.errors import ProtocolError
from ringtmp.model.allowed_operators import resolve
from ringtmp.model.portable_layer import Argument, Items, Named, Op, Ref

_NAMED = {"ScalarType": "dtype", "Layout": "layout", "MemoryFormat": "memory_format", "Device": "device"}
#: Gradients that are lists of rows instead of tensors: nothing here could send, clip or add them.
_SPARSE = {"sparse", "sparse_grad"}
#: How a window moves over an image. Kernels multiply these without asking whether the product fits.
_WINDOW = {"kernel_size", "stride", "padding", "output_padding", "dilation"}
_LARGEST_WINDOW = 2**24


@cache
def _declared(target: str) -> tuple[tuple[str, str, bool], ...] | None:
    """Name, type and whether by keyword alone, in order; None: not an ATen operator."""
    schema = getattr(resolve(target), "_schema", None)
    if schema is None:
        return None
    return tuple((each.name, str(each.real_type), each.kwarg_only) for each in schema.arguments)


def check_arguments(op: Op) -> None:
    """ProtocolError for an operation that gives an argument of another kind than declared, or one not declared."""
    declared = _declared(op.target)
    if declared is None:
        if op.kwargs or any(isinstance(each, Named) for each in op.args):
            raise ProtocolError(f"{op.target} works on numbers and takes no named arguments")
        return
    by_place = [(name, kind) for name, kind, keyword in declared if not keyword]
    if len(op.args) > len(by_place):
        raise ProtocolError(f"{op.target} takes {len(by_place)} arguments by place and was given {len(op.args)}")
    for (name, kind), value in zip(by_place, op.args, strict=False):
        _check(op.target, name, kind, value)
    kinds = {name: kind for name, kind, _ in declared}
    for name, value in op.kwargs.items():
        if name not in kinds:
            raise ProtocolError(f"{op.target} has no argument {name!r}")
        _check(op.target, name, kinds[name], value)


def _check(target: str, name: str, kind: str, value: Argument) -> None:
    wanted = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    if value is None:
        return  # torch refuses it where it is not optional
    if not _fits(name, wanted, value):
        raise ProtocolError(f"{target}: {_said(value)} is no {_NAMED.get(wanted, wanted)} for {name!r}")


def _fits(name: str, wanted: str, value: Argument) -> bool:
    if wanted in _NAMED:
        return isinstance(value, Named) and value.kind == _NAMED[wanted]
    if isinstance(value, Named) or wanted == "Generator":
        return False
    if wanted == "bool":
        # Pinned memory is for other devices than the processor.
        return isinstance(value, bool) and not (value and (name in _SPARSE or name == "pin_memory"))
    if wanted == "str":
        return isinstance(value, str)
    if name in _WINDOW:
        sizes = value.values if isinstance(value, Items) else (value,)
        return all(isinstance(each, int) and abs(each) <= _LARGEST_WINDOW for each in sizes)
    if wanted.startswith("List["):
        inner = wanted[5:-1].removeprefix("Optional[").removesuffix("]")
        if isinstance(value, Items):
            return all(each is None or _fits(name, inner, each) for each in value.values)
        return isinstance(value, Ref) or (inner in ("int", "float") and _is_number(value))  # one number for all
    return isinstance(value, Ref) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)  # bool is one: aten.mul(x, True)


def _said(value: Any) -> str:
    return f"{value.kind} {value.name!r}"[:60] if isinstance(value, Named) else repr(value)[:60]

"""What an exported operator must be to travel: on the list, and of a size that shapes alone decide."""

from __future__ import annotations

from torch.fx import Node

from ringtmp.errors import UsageError
from ringtmp.model import find_source_line
from ringtmp.model.allowed_operators import ATEN_OVERLOADS, SIZE_FUNCTIONS

#: Makes a tensor into a number.
_NUMBER = "aten.item.default"


def refuse_operator(label: str, target: str, node: Node) -> None:
    """UsageError, with the module and the user's line, for one that cannot travel."""
    where = find_source_line.of_node(node)
    if target == _NUMBER:
        raise UsageError(
            f"{label} makes a tensor into a number{where}, which would stay what it was for one example: keep it as a "
            "tensor"
        )
    if target not in ATEN_OVERLOADS and target not in SIZE_FUNCTIONS:
        raise UsageError(
            f"{label} uses the operator {target}{where}, which is not on RingTMP's list of operators that may travel: "
            "write that part with ordinary tensor operations"
        )
    if node.meta.get("unbacked_bindings"):
        raise UsageError(
            f"{label} makes a tensor whose size depends on the values of another{where}: keep all its elements, and use "
            "torch.where or a mask instead"
        )

"""Which parameters of a layer are hidden matrices: those that multiply what passes through.

Pure. A trained parameter of two dimensions is one if the first operator that uses it, however it is turned or sliced before,
is a matrix product or a recurrent layer. A table that is looked up or added is none, nor is the output layer that shares
such a table. The first use decides because it lies in the layer that owns the parameter wherever a module is cut.
"""

from __future__ import annotations

from ringtmp.model.portable_layer import Argument, Layer, slots

_PRODUCTS = "linear matmul mm addmm bmm baddbmm einsum tensordot inner lstm gru rnn_tanh rnn_relu"
_SAME_VALUES = """
t transpose permute swapaxes swapdims numpy_T mT mH adjoint view reshape contiguous alias clone detach unsqueeze squeeze
flatten unflatten expand slice narrow split split_with_sizes chunk unbind select tensor_split to _to_copy getitem
"""
PRODUCTS, SAME_VALUES = frozenset(_PRODUCTS.split()), frozenset(_SAME_VALUES.split())


def hidden_matrices(layer: Layer) -> frozenset[str]:
    """Names of the layer's hidden matrices."""
    graph = layer.train
    wanted = {each.name for each in layer.tensors if each.trainable and len(each.shape) == 2}
    turned = {slot: each.name for slot, each in enumerate(graph.inputs) if each.name in wanted and each.kind != "input"}
    found: set[str] = set()
    for position, op in enumerate(graph.ops, start=len(graph.inputs)):
        given: tuple[Argument, ...] = (*op.args, *op.kwargs.values())
        used = {turned[slot] for value in given for slot in slots(value) if slot in turned} & wanted
        name = op.target.split(".")[1] if "." in op.target else op.target
        if name in SAME_VALUES and len(used) == 1:
            turned[position] = next(iter(used))
            continue
        wanted -= used
        if name in PRODUCTS:
            found |= used
    return frozenset(found)

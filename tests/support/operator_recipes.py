"""Sane arguments of operators whose schema does not say what fits: a function per operator from choices to arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from operator_calls import Draw, T
from operator_layers import LAYERS, Recipe


def _product(draw: Draw) -> dict[str, Any]:
    """For every kind of matrix product: names say which."""
    b, n, k, m = draw.one([1, 2, 3]), draw.size(), draw.size(), draw.size()
    return {
        "batch1": draw.tensor(b, n, k), "batch2": draw.tensor(b, k, m), "mat1": draw.tensor(n, k),
        "self": draw.tensor(n, k), "mat2": draw.tensor(k, m), "mat": draw.tensor(n, k), "vec": draw.tensor(k),
    }  # fmt: skip


def _with(self_of: Callable[[Draw, dict[str, Any]], T]) -> Recipe:
    def recipe(draw: Draw) -> dict[str, Any]:
        found = _product(draw)
        return {**found, "self": self_of(draw, found)}

    return recipe


def _into(draw: Draw, found: dict[str, Any]) -> T:
    return draw.tensor(found["mat1"].shape[0], found["mat2"].shape[1])


def _bmm(draw: Draw) -> dict[str, Any]:
    found = _product(draw)
    return {"self": found["batch1"], "mat2": found["batch2"]}


def _vectors(draw: Draw) -> dict[str, Any]:
    n, m = draw.size(), draw.size()
    return {
        "self": draw.tensor(n), "tensor": draw.tensor(n), "vec2": draw.tensor(m), "vec1": draw.tensor(n),
        "other": draw.tensor(m, n),
    }  # fmt: skip


def _addr(draw: Draw) -> dict[str, Any]:
    found = _vectors(draw)
    return {**found, "self": draw.tensor(found["vec1"].shape[0], found["vec2"].shape[0])}


def _gather(draw: Draw) -> dict[str, Any]:
    dim = draw.dim(draw.base)
    index = draw.indices(*draw.base, below=draw.base[dim])
    index = T(index.shape, draw.one(["int64", "int64", "int32"]), index.fill, index.layout)
    return {
        "self": draw.tensor(*draw.base), "dim": dim, "index": index, "indices": index,
        "src": draw.tensor(*draw.base), "value": draw.one([1.5, 2, 0]), "sparse_grad": draw.chance(0.05),
    }  # fmt: skip


def _index_dim(draw: Draw) -> dict[str, Any]:
    dim, count = draw.dim(draw.base), draw.size()
    source = list(draw.base)
    source[dim] = count
    return {
        "self": draw.tensor(*draw.base), "dim": dim, "index": draw.indices(count, below=draw.base[dim]),
        "source": draw.tensor(*source), "alpha": draw.one([1, 2]),
    }  # fmt: skip


def _index(draw: Draw) -> dict[str, Any]:
    count = draw.one([1, 2, 3, 5])
    used = draw.one([1, 1, 2, 3])
    indices: list[Any] = [None if draw.chance(0.2) else draw.indices(count, below=each) for each in draw.base[:used]]
    if draw.chance(0.2):
        indices = [draw.tensor(*draw.base[:1], fill="bool", dtype="bool")]
    return {"self": draw.tensor(*draw.base), "indices": indices, "values": draw.tensor(*draw.one([(), (1,)]))}


def _take(draw: Draw) -> dict[str, Any]:
    count = 1
    for size in draw.base:
        count *= size
    return {"self": draw.tensor(*draw.base), "index": T((draw.size(),), "int64", f"<{count}", "plain")}


def _einsum(draw: Draw) -> dict[str, Any]:
    a, b, c = draw.size(), draw.size(), draw.size()
    return draw.one([
        {"equation": "ij,jk->ik", "tensors": [draw.tensor(a, b), draw.tensor(b, c)]},
        {"equation": "bij,bjk", "tensors": [draw.tensor(2, a, b), draw.tensor(2, b, c)]},
        {"equation": "ii->i", "tensors": [draw.tensor(a, a)]},
        {"equation": "...i,i->...", "tensors": [draw.tensor(a, b), draw.tensor(b)]},
        {"equation": "i,j,k->kji", "tensors": [draw.tensor(a), draw.tensor(b), draw.tensor(c)], "path": [0, 1, 0, 1]},
    ])  # fmt: skip


def _reshaping(draw: Draw) -> dict[str, Any]:
    shape = list(draw.base)
    draw.random.shuffle(shape)
    count = 1
    for each in shape:
        count *= each
    size = draw.one([shape, [count], [-1], [count, 1]])
    source = T(draw.base, draw.dtype, "normal", "plain")
    return {"self": source, "size": size, "shape": size, "other": draw.tensor(*shape)}


def _expanding(draw: Draw) -> dict[str, Any]:
    size = [draw.one([1, 2]), *draw.base]
    return {
        "self": draw.tensor(*(draw.one([1, each]) for each in draw.base)),
        "size": size,
        "other": draw.tensor(*size),
    }


def _dims(draw: Draw) -> dict[str, Any]:
    count = draw.one([2, 3])
    base = (draw.size(), draw.size(), draw.size())[:count]
    dims = list(range(count))
    draw.random.shuffle(dims)
    return {"self": draw.tensor(*base), "dims": dims, "source": dims, "destination": dims[::-1]}


def _split(draw: Draw) -> dict[str, Any]:
    dim = draw.dim(draw.base)
    size = draw.base[dim]
    first = draw.random.randrange(size + 1)
    return {
        "self": draw.tensor(*draw.base), "dim": dim, "split_sizes": [first, size - first],
        "split_size": draw.one([1, 2, 3]), "sizes": [size, 1], "chunks": draw.one([1, 2, 3]), "sections": draw.one([1, 2]),
        "indices": [first], "tensor_indices_or_sections": T(draw.one([(), (2,)]), "int64", "<3"), "start": draw.one([0, None]),
        "end": draw.one([None, 1, size]), "step": 1, "length": 1, "index": first % size, "dimension": dim, "size": 1,
    }  # fmt: skip


def _split_sizes(draw: Draw) -> dict[str, Any]:
    found = _split(draw)
    return {**found, "split_size": found["split_sizes"]}


def _narrow(draw: Draw) -> dict[str, Any]:
    found = _split(draw)
    return {**found, "start": draw.one([0, 0, T((), "int64", "zero")])}


def _scatter_into(draw: Draw) -> dict[str, Any]:
    found = _split(draw)
    shape = list(draw.base)
    shape.pop(found["dim"])
    return {**found, "src": draw.tensor(*shape)}


def _slice_scatter(draw: Draw) -> dict[str, Any]:
    return {**_split(draw), "src": draw.tensor(*draw.base), "start": None, "end": None, "step": 1}


def _repeats(draw: Draw) -> dict[str, Any]:
    dim = draw.dim(draw.base)
    repeats = T((draw.base[dim],), draw.one(["int64", "int32"]), "<4")
    return {"self": draw.tensor(*draw.base), "repeats": repeats, "dim": dim, "output_size": None}


def _multinomial(draw: Draw) -> dict[str, Any]:
    width = draw.size()
    return {
        "self": draw.tensor(*draw.one([(width,), (2, width)]), fill="positive"),
        "num_samples": draw.random.randrange(1, width + 1),
    }


def _square(draw: Draw) -> dict[str, Any]:
    n, m = draw.size(), draw.size()
    return {
        "self": draw.tensor(*draw.one([(), (2,)]), n, m),
        "diagonal": draw.one([0, 1, -1]),
        "k": draw.one([1, 2, 3]),
    }


def _matrix(draw: Draw) -> dict[str, Any]:
    return {
        "self": draw.tensor(draw.size(), draw.size()),
        "k": draw.one([0, 1, 2, 3]),
        "ord": draw.one([1, 2, -1, float("inf")]),
    }


def _cross(draw: Draw) -> dict[str, Any]:
    n = draw.size()
    return {"self": draw.tensor(n, 3), "other": draw.tensor(n, 3), "dim": draw.one([1, -1, None])}


def _tensordot(draw: Draw) -> dict[str, Any]:
    a, b, c = draw.size(), draw.size(), draw.size()
    return {"self": draw.tensor(a, b), "other": draw.tensor(b, c), "dims_self": [1], "dims_other": [0]}


def _stft(draw: Draw) -> dict[str, Any]:
    size = draw.one([4, 8])
    return {
        "self": draw.tensor(*draw.one([(), (2,)]), 40), "n_fft": size, "hop_length": draw.one([None, 2, 4]),
        "win_length": draw.one([None, size]), "window": draw.one([None, draw.tensor(size)]), "return_complex": True,
        "onesided": draw.one([None, True]), "align_to_window": None,
    }  # fmt: skip


def _whole(draw: Draw) -> dict[str, Any]:
    return {
        "self": draw.indices(*draw.base, below=5), "other": draw.indices(*draw.base, below=5),
        "num_classes": draw.one([-1, 5, 7]),
    }  # fmt: skip


def _whole_scalar(draw: Draw) -> dict[str, Any]:
    found = _whole(draw)
    return found if draw.chance(0.5) else {"self": found["self"]}


def _distances(draw: Draw) -> dict[str, Any]:
    n, m, d = draw.size(), draw.size(), draw.size()
    return {
        "x1": draw.tensor(n, d),
        "x2": draw.tensor(m, d),
        "p": draw.one([0.0, 1.0, 2.0, 3.0, float("inf")]),
        "compute_mode": draw.one([None, 0, 1, 2]),
    }


def _range(draw: Draw) -> dict[str, Any]:
    return {
        "start": draw.one([0, 1, 0.5]),
        "end": draw.one([1, 5, 7.5]),
        "steps": draw.one([0, 1, 5]),
        "low": 0,
        "high": draw.one([1, 9]),
    }


def _line(draw: Draw) -> dict[str, Any]:
    return {"steps": draw.one([0, 1, 5]), "start": draw.tensor(), "end": draw.tensor()}


def _fill(draw: Draw) -> dict[str, Any]:
    return {"self": draw.tensor(*draw.base), "value": draw.one([draw.tensor(), 1.5])}


def _buckets(draw: Draw) -> dict[str, Any]:
    return {"boundaries": T((draw.size(),), draw.dtype, "steps")}


def _sorted_by(draw: Draw) -> dict[str, Any]:
    dim = draw.dim(draw.base)
    return {"self": draw.tensor(*draw.base), "dim": dim, "k": draw.random.randrange(draw.base[dim] + 1)}


def _probability(draw: Draw) -> dict[str, Any]:
    return {"self": draw.tensor(*draw.base, fill="unit"), "p": draw.one([0.5, 0.0, 1.0])}


def _chances(draw: Draw) -> dict[str, Any]:
    return {"self": draw.tensor(*draw.base, fill="unit"), "p": draw.tensor(*draw.base, fill="unit")}


def _sections(draw: Draw) -> dict[str, Any]:
    first, second = draw.size(), draw.size()
    return {"self": draw.tensor(first * second, 2), "dim": 0, "sizes": [first, second]}


def _masked(draw: Draw) -> dict[str, Any]:
    return {
        "self": draw.tensor(*draw.base), "mask": draw.tensor(*draw.base, fill="bool", dtype="bool"),
        "source": draw.tensor(*draw.base), "value": draw.one([draw.tensor(), 1.5, -2]),
    }  # fmt: skip


RECIPES: dict[str, Recipe] = {
    **LAYERS,
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "view_as", "reshape_as"), _reshaping),
    **dict.fromkeys(("expand", "broadcast_to", "expand_copy", "expand_as"), _expanding),
    **dict.fromkeys(("permute", "movedim", "moveaxis"), _dims),
    **dict.fromkeys((
        "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split", "tensor_split", "slice", "select", "narrow_copy",
        "unfold", "unfold_copy", "unbind"), _split),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "take_along_dim"), _gather),
    **dict.fromkeys(("triu", "tril", "diag_embed", "diagonal"), _square),
    **dict.fromkeys(("bitwise_not", "one_hot"), _whole),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "__and__", "__or__"), _whole_scalar),
    **dict.fromkeys((
        "t", "mT", "mH", "adjoint", "trace", "rot90", "linalg_matrix_norm", "linalg_norm", "numpy_T", "diag"), _matrix),
    "mm": _product, "mv": _product, "addmm": _with(_into), "bmm": _bmm,
    "addmv": _with(lambda draw, found: draw.tensor(found["mat"].shape[0])),
    "addbmm": _with(lambda draw, found: draw.tensor(found["batch1"].shape[1], found["batch2"].shape[2])),
    "baddbmm": _with(lambda draw, found: draw.tensor(*found["batch1"].shape[:2], found["batch2"].shape[2])),
    "matmul": lambda draw: {"self": (found := _product(draw))["self"], "other": found["mat2"]},
    "dot": _vectors, "outer": _vectors, "inner": _vectors, "addr": _addr, "einsum": _einsum, "tensordot": _tensordot,
    "index_select": _index_dim, "index_add": _index_dim, "index": _index, "index_put": _index, "take": _take,
    "split": _split, "split.sizes": _split_sizes, "narrow": _narrow, "select_scatter": _scatter_into,
    "slice_scatter": _slice_scatter, "repeat_interleave": _repeats, "multinomial": _multinomial, "cross": _cross,
    "stft": _stft, "cdist": _distances, "arange": _range, "randint": _range, "linspace": _range, "unflatten": _sections,
    "bucketize": _buckets, "topk": _sorted_by, "bernoulli": _probability, "bernoulli.Tensor": _chances,
    "masked_fill": _masked, "masked_scatter": _masked, "fill": _fill, "linspace.Tensor_Tensor": _line,
    "linspace.Scalar_Tensor": _line, "linspace.Tensor_Scalar": _line,
}  # fmt: skip

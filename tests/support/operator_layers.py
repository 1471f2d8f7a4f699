"""Sane arguments of the operators layers are made of: convolutions, recurrences, norms, tables, pools, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from operator_calls import Draw, T

Recipe = Callable[[Draw], dict[str, Any]]


def _some(draw: Draw, made: T) -> T | None:
    return made if draw.chance(0.6) else None


def _convolution(dims: int, transposed: bool) -> Recipe:
    def recipe(draw: Draw) -> dict[str, Any]:
        groups = draw.one([1, 1, 1, 2, 3])
        into, out = groups * draw.one([1, 2]), groups * draw.one([1, 2, 3])
        kernel = [draw.one([1, 2, 3]) for _ in range(dims)]
        batch = [draw.one([1, 2, 3])] if draw.chance(0.8) else []
        image = [each + draw.one([0, 2, 4]) for each in kernel]
        weight = (into, out // groups) if transposed else (out, into // groups)
        found = {
            "input": draw.tensor(*batch, into, *image),
            "weight": draw.tensor(*weight, *kernel),
            "bias": _some(draw, draw.tensor(out)),
            "stride": [draw.one([1, 2])] * dims,
            "padding": [draw.one([0, 1])] * dims,
            "dilation": [1] * dims,
            "groups": groups,
        }
        if transposed:
            found["output_padding"] = [0] * dims
        return found

    return recipe


def _recurrent(gates: int, states: int) -> Recipe:
    def recipe(draw: Draw) -> dict[str, Any]:
        layers, ways, bias = draw.one([1, 1, 2]), draw.one([1, 2]), draw.chance(0.7)
        width, hidden, batch, length = draw.size(), draw.one([1, 2, 4, 8]), draw.one([1, 2, 3]), draw.one([1, 2, 4])
        params = []
        for layer in range(layers):
            for _ in range(ways):
                entering = width if layer == 0 else hidden * ways
                params += [draw.tensor(gates * hidden, entering), draw.tensor(gates * hidden, hidden)]
                params += [draw.tensor(gates * hidden)] * 2 if bias else []
        first = draw.chance(0.5)
        state = draw.tensor(layers * ways, batch, hidden)
        return {
            "input": draw.tensor(*((batch, length) if first else (length, batch)), width),
            "data": draw.tensor(length * batch, width),
            "batch_sizes": T((length,), "int64", f"={batch}"),
            "hx": state if states == 1 else [state, draw.tensor(*state.shape)],
            "params": params,
            "has_biases": bias,
            "num_layers": layers,
            "dropout": draw.one([0.0, 0.5]),
            "train": draw.chance(0.8),
            "bidirectional": ways == 2,
            "batch_first": first,
        }

    return recipe


def _norm(draw: Draw) -> dict[str, Any]:
    channels = draw.size()
    shape = (draw.one([1, 2, 4]), channels, *(draw.one([2, 3]) for _ in range(draw.one([1, 1, 2]))))
    return {
        "input": draw.tensor(*shape),
        "weight": _some(draw, draw.tensor(channels)),
        "bias": _some(draw, draw.tensor(channels)),
        "running_mean": (stats := _some(draw, draw.tensor(channels))),
        "running_var": None if stats is None else draw.tensor(channels, fill="positive"),
        "training": stats is None or draw.chance(0.6),
        "use_input_stats": stats is None or draw.chance(0.6),
        "momentum": 0.1,
        "eps": 1e-5,
    }


def _group_norm(draw: Draw) -> dict[str, Any]:
    groups = draw.one([1, 2, 4])
    channels, batch, pixels = groups * draw.one([1, 2]), draw.one([1, 2]), draw.one([1, 4])
    return {
        "input": draw.tensor(batch, channels, pixels),
        "num_groups": groups, "group": groups, "N": batch, "C": channels, "HxW": pixels,
        "weight": _some(draw, draw.tensor(channels)), "bias": _some(draw, draw.tensor(channels)), "eps": 1e-5,
    }  # fmt: skip


def _layer_norm(draw: Draw) -> dict[str, Any]:
    last = list(draw.base[-draw.one([1, 1, 2]) :])
    return {
        "input": draw.tensor(*draw.base), "normalized_shape": last, "eps": 1e-5,
        "weight": _some(draw, draw.tensor(*last)), "bias": _some(draw, draw.tensor(*last)),
    }  # fmt: skip


def _embedding(draw: Draw) -> dict[str, Any]:
    rows = draw.one([1, 3, 10])
    return {
        "weight": draw.tensor(rows, draw.size()), "indices": draw.indices(*draw.base, below=rows),
        "padding_idx": draw.one([-1, 0, rows - 1]), "sparse": draw.chance(0.1),
    }  # fmt: skip


def _embedding_bag(draw: Draw) -> dict[str, Any]:
    rows, count, mode = draw.one([1, 3, 10]), draw.one([0, 1, 4, 9]), draw.one([0, 0, 1, 2])
    indices = draw.indices(count, below=rows)
    bags = draw.one([1, 2, 3])
    return {
        "weight": draw.tensor(rows, draw.one([1, 3, 8, 16])), "indices": indices, "sparse": draw.chance(0.05),
        "offsets": T((min(bags, max(1, count)),), indices.dtype, "steps" if count and draw.chance(0.7) else "zero"),
        "mode": mode, "per_sample_weights": draw.tensor(count) if mode == 0 and draw.chance(0.5) else None,
        "include_last_offset": draw.chance(0.2), "padding_idx": draw.one([None, None, 0, rows - 1]),
    }  # fmt: skip


def _linear(draw: Draw) -> dict[str, Any]:
    width, out = draw.size(), draw.size()
    return {
        "input": draw.tensor(*draw.base, width), "weight": draw.tensor(out, width), "bias": _some(draw, draw.tensor(out)),
    }  # fmt: skip


def _bilinear(draw: Draw) -> dict[str, Any]:
    n, a, b, out = draw.size(), draw.size(), draw.size(), draw.size()
    return {
        "input1": draw.tensor(n, a), "input2": draw.tensor(n, b), "weight": draw.tensor(out, a, b),
        "bias": _some(draw, draw.tensor(out)),
    }  # fmt: skip


def _classes(draw: Draw) -> dict[str, Any]:
    rows, classes = draw.size(), draw.one([1, 2, 5])
    image = draw.one([(), (), (3,), (2, 3)])
    return {
        "self": draw.tensor(rows, classes, *image), "target": T((rows, *image), "int64", f"<{classes}"),
        "weight": _some(draw, draw.tensor(classes, fill="positive")), "reduction": draw.one([0, 1, 2]),
        "ignore_index": draw.one([-100, 0, 1]),
    }  # fmt: skip


def _flat_classes(draw: Draw) -> dict[str, Any]:
    found = _classes(draw)
    return {
        **found,
        "self": draw.tensor(*found["self"].shape[:2]),
        "target": T(found["target"].shape[:1], "int64", found["target"].fill),
    }


def _image_classes(draw: Draw) -> dict[str, Any]:
    found = _classes(draw)
    shape = (*found["self"].shape[:2], 2, 3)
    return {**found, "self": draw.tensor(*shape), "target": T((shape[0], 2, 3), "int64", found["target"].fill)}


def _loss(draw: Draw) -> dict[str, Any]:
    shape = draw.base
    return {
        "self": draw.tensor(*shape, fill="unit"), "target": draw.tensor(*shape, fill="unit"), "input": draw.tensor(*shape),
        "weight": _some(draw, draw.tensor(*shape[-1:])), "pos_weight": _some(draw, draw.tensor(*shape[-1:])),
        "reduction": draw.one([0, 1, 2]), "input1": draw.tensor(*shape), "input2": draw.tensor(*shape),
        "anchor": draw.tensor(*shape), "positive": draw.tensor(*shape), "negative": draw.tensor(*shape),
        "p": draw.one([1.0, 2.0, 3.0]), "margin": 0.5, "x1": draw.tensor(*shape), "x2": draw.tensor(*shape),
    }  # fmt: skip


def _cosine_loss(draw: Draw) -> dict[str, Any]:
    n, m = draw.size(), draw.size()
    return {
        "input1": draw.tensor(n, m), "input2": draw.tensor(n, m), "target": draw.tensor(n), "margin": 0.5,
        "reduction": draw.one([0, 1, 2]),
    }  # fmt: skip


def _image(dims: int) -> Callable[[Draw], T]:
    def make(draw: Draw) -> T:
        batch = [draw.one([1, 2])] if draw.chance(0.8) else []
        return draw.tensor(*batch, draw.one([1, 2, 4]), *(draw.one([3, 4, 7]) for _ in range(dims)))

    return make


def _pool(dims: int) -> Recipe:
    def recipe(draw: Draw) -> dict[str, Any]:
        kernel = draw.one([1, 2, 3])
        return {
            "self": _image(dims)(draw), "kernel_size": [kernel] * dims, "stride": draw.one([[], [1] * dims, [2] * dims]),
            "padding": [draw.one([0, kernel // 2])] * dims, "dilation": [1] * dims,
            "output_size": [draw.one([1, 2, 3, 5]) for _ in range(dims)], "ceil_mode": draw.chance(0.3),
            "divisor_override": draw.one([None, None, 2]),
        }  # fmt: skip

    return recipe


def _upsample(dims: int) -> Recipe:
    def recipe(draw: Draw) -> dict[str, Any]:
        image = draw.tensor(draw.one([1, 2]), draw.one([1, 2, 4]), *(draw.one([1, 3, 4]) for _ in range(dims)))
        by_size = draw.chance(0.5)
        size = [draw.one([1, 2, 5, 8]) for _ in range(dims)]
        return {
            "self": image, "input": image, "output_size": size, "align_corners": draw.chance(0.5),
            **({} if by_size else {"scales": 2.0, "scales_h": 2.0, "scales_w": 1.5}),
            "scale_factors": None if by_size else [draw.one([0.5, 1.0, 2.0, 2.7]) for _ in range(dims)],
        }  # fmt: skip

    return recipe


def _upsample_any(dims: int) -> Recipe:
    """The `vec` overloads take a size or factors, never both."""

    def recipe(draw: Draw) -> dict[str, Any]:
        found = _upsample(dims)(draw)
        if found["scale_factors"] is not None and draw.chance(0.5):
            found["output_size"] = None
        elif draw.chance(0.5):
            found["scale_factors"] = None
        return found

    return recipe


def _pad(dims: int) -> Recipe:
    def recipe(draw: Draw) -> dict[str, Any]:
        pads = [draw.one([0, 1, 2, -1]) for _ in range(2 * dims)]
        return {
            "self": _image(dims)(draw),
            "padding": pads,
            "pad": pads,
            "mode": draw.one(["constant", "reflect", "replicate", "circular"]),
            "value": None,
        }

    return recipe


def _columns(draw: Draw) -> dict[str, Any]:
    size, kernel, channels = (
        [draw.one([3, 4]), draw.one([3, 5])],
        [draw.one([1, 2]), draw.one([1, 3])],
        draw.one([1, 2]),
    )
    blocks = (size[0] - kernel[0] + 1) * (size[1] - kernel[1] + 1)
    return {
        "self": draw.tensor(draw.one([1, 2]), channels * kernel[0] * kernel[1], blocks), "output_size": size,
        "kernel_size": kernel, "dilation": [1, 1], "padding": [0, 0], "stride": [1, 1],
    }  # fmt: skip


def _patches(draw: Draw) -> dict[str, Any]:
    return {
        "self": _image(2)(draw),
        "kernel_size": [draw.one([1, 2]), 2],
        "dilation": [1, 1],
        "padding": [draw.one([0, 1])] * 2,
        "stride": [draw.one([1, 2])] * 2,
    }


def _attention(draw: Draw) -> dict[str, Any]:
    batch, heads, length, keys, width = (
        draw.one([1, 2]),
        draw.one([1, 2]),
        draw.size(),
        draw.size(),
        draw.one([2, 8, 16]),
    )
    mask = draw.one([None, None, draw.tensor(length, keys), draw.tensor(length, keys, fill="bool", dtype="bool")])
    return {
        "query": draw.tensor(batch, heads, length, width), "key": draw.tensor(batch, heads, keys, width),
        "value": draw.tensor(batch, heads, keys, draw.one([width, width, 4])), "attn_mask": mask,
        "dropout_p": draw.one([0.0, 0.3]), "is_causal": mask is None and draw.chance(0.4), "enable_gqa": draw.chance(0.1),
    }  # fmt: skip


def _shuffle(draw: Draw) -> dict[str, Any]:
    by = draw.one([1, 2, 3])
    return {
        "self": draw.tensor(draw.one([1, 2]), by * by * draw.one([1, 2]), by * 2, by), "upscale_factor": by,
        "downscale_factor": by,
    }  # fmt: skip


def _weight_norm(draw: Draw) -> dict[str, Any]:
    dim = draw.one([0, len(draw.base) - 1])
    shape = [1] * len(draw.base)
    shape[dim] = draw.base[dim]
    return {"v": draw.tensor(*draw.base), "g": draw.tensor(*shape), "dim": dim}


def _prelu(draw: Draw) -> dict[str, Any]:
    n, c = draw.size(), draw.size()
    return {"self": draw.tensor(n, c), "weight": draw.tensor(draw.one([1, c]))}


def _glu(draw: Draw) -> dict[str, Any]:
    return {"self": draw.tensor(*draw.base, 2 * draw.size()), "dim": -1}


def _dropout(draw: Draw) -> dict[str, Any]:
    shape = draw.base if len(draw.base) > 1 else (*draw.base, 2)
    return {
        "input": draw.tensor(*shape),
        "self": draw.tensor(*shape),
        "p": draw.one([0.5, 0.0, 1.0]),
        "train": draw.chance(0.8),
    }


def _channels_last(draw: Draw) -> dict[str, Any]:
    return {"self": _image(2)(draw)} if draw.chance(0.5) else {}


LAYERS: dict[str, Recipe] = {
    **{f"conv{n}d": _convolution(n, False) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _convolution(n, True) for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": _pool(n) for n in (1, 2, 3) for kind in ("avg", "max", "adaptive_avg", "adaptive_max")},
    **{f"{kind}_pad{n}d": _pad(n) for n in (1, 2) for kind in ("reflection", "replication")},
    **dict.fromkeys((
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy", "soft_margin_loss",
        "binary_cross_entropy_with_logits", "margin_ranking_loss", "hinge_embedding_loss", "triplet_margin_loss",
        "poisson_nll_loss", "pairwise_distance", "cosine_similarity", "dist"), _loss),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), _dropout),
    "lstm": _recurrent(4, 2), "gru": _recurrent(3, 1), "rnn_tanh": _recurrent(1, 1), "rnn_relu": _recurrent(1, 1),
    "batch_norm": _norm, "instance_norm": _norm, "group_norm": _group_norm, "native_group_norm": _group_norm,
    "layer_norm": _layer_norm, "native_layer_norm": _layer_norm, "rms_norm": _layer_norm, "_weight_norm": _weight_norm,
    "embedding": _embedding, "embedding_bag": _embedding_bag, "linear": _linear, "bilinear": _bilinear,
    "nll_loss": _flat_classes, "nll_loss_nd": _classes, "cross_entropy_loss": _classes, "nll_loss2d": _image_classes,
    "cosine_embedding_loss": _cosine_loss, "im2col": _patches, "col2im": _columns, "pad": _pad(2), "constant_pad_nd": _pad(1),
    "upsample_nearest1d": _upsample_any(1), "upsample_nearest2d": _upsample_any(2), "upsample_bilinear2d": _upsample_any(2),
    "upsample_bicubic2d": _upsample_any(2), "scaled_dot_product_attention": _attention, "prelu": _prelu, "glu": _glu,
    "pixel_shuffle": _shuffle, "pixel_unshuffle": _shuffle, "contiguous": _channels_last, "clone": _channels_last,
}  # fmt: skip

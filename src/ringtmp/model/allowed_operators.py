"""The operators a received graph may use: an explicit list, because the whole `aten` namespace is not safe.

`aten.from_file` maps files, `aten.set_` reaches foreign storage, `aten.empty` shows what memory held before. What is
listed computes new values from its arguments, or changes them in place, and nothing else. Sizes are integers, for
which a few Python operators are enough.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ringtmp.errors import ProtocolError

# name, or name:overload,overload; a bare name means its "default" overload.
_ATEN = """
abs acos add:Tensor,Scalar addbmm addcdiv addcmul addmm alias all:default,dim,dims amax amin
any:default,dim,dims arange:default,start argmax argmin asin atan atan2 avg_pool1d avg_pool2d avg_pool3d
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d baddbmm
batch_norm binary_cross_entropy bitwise_and:Tensor,Scalar,Scalar_Tensor bitwise_or:Tensor,Scalar,Scalar_Tensor
bitwise_not bmm broadcast_to broadcast_tensors bucketize:Tensor,Scalar cat ceil celu chunk clamp:default,Tensor
clamp_min:default,Tensor clamp_max:default,Tensor clone col2im im2col constant_pad_nd contiguous conv1d conv2d
conv3d conv_transpose1d conv_transpose2d:input conv_transpose3d:input copy cos cosh cosine_similarity cross
cummax cumprod cumsum detach diag diagonal diff div:Tensor,Scalar,Tensor_mode,Scalar_mode dot dropout
alpha_dropout feature_dropout einsum elu embedding embedding_bag:default,padding_idx
eq:Tensor,Scalar erf erfc exp expand expand_as expm1 eye:default,m fill:Scalar,Tensor flatten:using_ints flip floor
floor_divide:default,Scalar fmod:Tensor,Scalar full full_like gather ge:Tensor,Scalar gelu glu group_norm
gru:input gt:Tensor,Scalar hardsigmoid hardswish hardtanh hardshrink index:Tensor index_select index_add
instance_norm isnan isinf layer_norm le:Tensor,Scalar leaky_relu lerp:Scalar,Tensor lift_fresh_copy linear
linspace:Tensor_Tensor,Tensor_Scalar,Scalar_Tensor,default log log10 log1p log2 log_sigmoid log_softmax:int
logical_and logical_not logical_or logical_xor logsumexp lstm:input lt:Tensor,Scalar
masked_fill:Scalar,Tensor matmul max:other,default,dim max_pool1d max_pool2d max_pool3d maximum mean:default,dim
min:other,default,dim minimum mish mm movedim:int,intlist mse_loss mul:Tensor,Scalar mv narrow:default,Tensor
native_layer_norm native_group_norm ne:Tensor,Scalar neg new_full new_ones new_zeros nll_loss norm:Scalar,ScalarOpt_dim
numpy_T ones ones_like one_hot outer pad permute pixel_shuffle pixel_unshuffle
pow:Tensor_Tensor,Tensor_Scalar,Scalar prelu prod:default,dim_int rand rand_like randn randn_like randint:default,low
bernoulli:default,p,Tensor reciprocal reflection_pad1d reflection_pad2d relu relu6
remainder:Tensor,Scalar,Scalar_Tensor repeat repeat_interleave:Tensor,self_Tensor,self_int replication_pad1d
replication_pad2d reshape reshape_as rms_norm rnn_tanh:input rnn_relu:input roll
round:default,decimals rrelu rsqrt rsub:Tensor,Scalar scalar_tensor scaled_dot_product_attention
scatter:value,src,reduce,value_reduce scatter_add select:int selu sigmoid sign silu sin sinh slice:Tensor
softmax:int softplus softshrink sort:default,stable split:Tensor,sizes,default split_with_sizes sqrt
square squeeze:default,dim,dims stack std:default,dim,correction stft sub:Tensor,Scalar sum:dim_IntList,default
swapaxes t tan tanh tensor_split:sections,indices,tensor_indices_or_sections threshold tile
to:device,dtype,other,dtype_layout __and__:Tensor,Scalar __or__:Tensor,Scalar
topk transpose:int triu tril trunc type_as unbind:int unflatten:int unfold unsqueeze
upsample_nearest1d:default,vec upsample_nearest2d:default,vec upsample_bilinear2d:default,vec
upsample_bicubic2d:default,vec var:default,dim,correction var_mean:default,dim,correction linalg_vector_norm
view view_as where:self,ScalarOther,ScalarSelf,Scalar xlogy:Tensor,Scalar_Other,Scalar_Self zeros zeros_like
add_:Tensor,Scalar sub_:Tensor,Scalar mul_:Tensor,Scalar div_:Tensor,Tensor_mode,Scalar,Scalar_mode relu_
leaky_relu_ hardtanh_ elu_ celu_ selu_ silu_ mish_ hardswish_ hardsigmoid_ relu6_ threshold_ dropout_
alpha_dropout_ feature_dropout_ masked_fill_:Scalar,Tensor clamp_:default,Tensor clamp_min_:default,Tensor
clamp_max_:default,Tensor sigmoid_ tanh_ exp_ neg_ abs_ sqrt_ rsqrt_ pow_:Scalar,Tensor fill_:Scalar,Tensor
zero_ copy_ detach_ lerp_:Scalar,Tensor addcmul_ addcdiv_ index_add_ unsqueeze_ squeeze_:default,dim,dims
transpose_ t_ bernoulli_:Tensor,float rrelu_ _to_copy _unsafe_view _softmax _log_softmax feature_alpha_dropout
feature_alpha_dropout_ sym_size:int,default sym_numel sym_stride:int,default kl_div huber_loss l1_loss
smooth_l1_loss square_ scatter_add_ triu_indices tril_indices normal:Tensor_float,Tensor_Tensor uniform_ normal_ exponential_
_weight_norm unsafe_chunk unsafe_split:Tensor mT mH adjoint positive negative multiply:Tensor,Scalar
divide:Tensor,Scalar,Tensor_mode,Scalar_mode subtract:Tensor,Scalar true_divide:Tensor,Scalar concat concatenate
clip:default,Tensor clip_:default,Tensor addmv addr baddbmm_ log_ multinomial argsort:default,stable
cosine_embedding_loss cross_entropy_loss nll_loss_nd nll_loss2d binary_cross_entropy_with_logits soft_margin_loss
margin_ranking_loss hinge_embedding_loss triplet_margin_loss poisson_nll_loss bilinear pairwise_distance cdist
unfold_copy nan_to_num isfinite hypot logaddexp
expand_copy column_stack hstack vstack dstack atleast_1d:default,Sequence atleast_2d:default,Sequence rot90
count_nonzero:default,dim_IntList logit tensordot inner kron swapdims linalg_norm linalg_matrix_norm
float_power:Tensor_Tensor,Tensor_Scalar,Scalar exp2 sinc sgn lgamma digamma erfinv frac heaviside ravel
narrow_copy select_scatter slice_scatter index_put index_put_ masked_scatter take take_along_dim trace
moveaxis:intlist,int diag_embed std_mean:default,dim,correction nanmean nansum aminmax mode median:default,dim
cummin logcumsumexp dist renorm rad2deg deg2rad signbit
arange:start_step conv1d:padding conv2d:padding conv3d:padding vdot matrix_H matrix_exp embedding_renorm_
"""

ATEN_OVERLOADS = frozenset(
    f"aten.{name}.{overload}"
    for entry in _ATEN.split()
    for name, _, overloads in [entry.partition(":")]
    for overload in (overloads or "default").split(",")
)


_LARGEST_SIZE = 2**63 - 1


def _on_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Sizes are numbers that fit a register: neither a string times a billion nor a number squared forty times is one."""

    def checked(*values: Any) -> Any:
        if not all(type(value) in (int, float) for value in values):
            raise ProtocolError("size arithmetic on something that is not a number")
        result = function(*values)
        if type(result) is int and not -_LARGEST_SIZE <= result <= _LARGEST_SIZE:
            raise ProtocolError("size arithmetic beyond 63 bits")
        return result

    return checked


def _item(values: Any, index: Any) -> Any:
    """One result of several. Tensors have operators of their own for this."""
    if not (isinstance(values, tuple | list) and type(index) is int):
        raise ProtocolError(f"cannot take item {str(index)[:20]!r} of a {type(values).__name__}")
    return values[index]


#: Arithmetic on sizes, and taking one result of several.
SIZE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": _item,
    "add": _on_numbers(operator.add),
    "sub": _on_numbers(operator.sub),
    "mul": _on_numbers(operator.mul),
    "floordiv": _on_numbers(operator.floordiv),
    "truediv": _on_numbers(operator.truediv),
    "mod": _on_numbers(operator.mod),
    "neg": _on_numbers(operator.neg),
    "sym_min": _on_numbers(min),
    "sym_max": _on_numbers(max),
    "sym_sum": lambda values: _on_numbers(lambda *each: sum(each))(*values),
    "sym_int": _on_numbers(int),
    "sym_float": _on_numbers(float),
    "trunc": _on_numbers(math.trunc),
}

#: Switches gradients off or on and gives the mode before, which a later call puts back: `torch.no_grad()` as operations.
GRAD_MODE = "grad_mode"


def _grad_mode(enabled: bool) -> bool:
    if type(enabled) is not bool:
        raise ProtocolError("a gradient mode that is neither on nor off")
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(enabled)
    return before


#: What `torch.export` adds to check sizes it already knows; a plan checks them too, so they do not travel.
ASSERTIONS = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range_for_size.default",
        "aten.sym_constrain_range.default",
        "aten._assert_async.msg",
    }
)


@cache
def resolve(target: str) -> Callable[..., Any]:
    """The callable behind a name in a graph; ProtocolError for anything not listed."""
    if target in SIZE_FUNCTIONS:
        return SIZE_FUNCTIONS[target]
    if target == GRAD_MODE:
        return _grad_mode
    if target not in ATEN_OVERLOADS:
        raise ProtocolError(f"operator {target!r} is not on the list of allowed operators")
    _, name, overload = target.split(".")
    function: Callable[..., Any] = getattr(getattr(torch.ops.aten, name), overload)
    return function

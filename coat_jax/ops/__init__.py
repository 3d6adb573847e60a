"""The layers of a transformer as functions on arrays, which keep little for the backward pass.

    linear, norm_linear              one or several linear layers, with the norm before them
    gated_mlp, mlp                   from norm to residual sum
    norm_qkv                         from the residual stream to the heads of attention
    attention, attention_linear      with the output projection
    attention_to_past                of one new token, for generation
    norm, rotate, cross_entropy      what stands between
    recompute                        of any function keeps its input only, in FP8

Each takes a `coat.Precision`, and works inside any framework, any `jit` and any mesh.
"""

from coat_jax.kernels.norm import Norm
from coat_jax.ops.attention import attention, attention_linear
from coat_jax.ops.attention_to_past import attention_to_past
from coat_jax.ops.cross_entropy import cross_entropy
from coat_jax.ops.dot_general import DotGeneral, Einsum
from coat_jax.ops.linear import linear, norm_linear
from coat_jax.ops.mlp import gated_mlp, mlp
from coat_jax.ops.norm import norm
from coat_jax.ops.qkv import norm_qkv
from coat_jax.ops.recompute import recompute
from coat_jax.ops.rotary import Llama3Scaling, Rotary, rotate

__all__ = [
    "DotGeneral",
    "Einsum",
    "Llama3Scaling",
    "Norm",
    "Rotary",
    "attention",
    "attention_linear",
    "attention_to_past",
    "cross_entropy",
    "gated_mlp",
    "linear",
    "mlp",
    "norm",
    "norm_linear",
    "norm_qkv",
    "recompute",
    "rotate",
]

"""FP8 residuals under `jax.checkpoint`: an array that the backward pass reads as FP8 codes.

    h = coat.save_fp8(h, "hidden")                                    in the model: an identity
    f = jax.checkpoint(f, policy=coat.policies.save_fp8("hidden"))    around it: JAX's own

    forward     h itself, exact to the last bit; saves codes and exponents, 1.06 bytes a value
    backward    recomputes what follows from the decoded values, instead of from what precedes h

`jax.checkpoint` asks its policy of each operation whether the result is saved or recomputed.
`save_fp8` has a rule of its own for this: if the policy says that it is saved, the forward pass also
encodes h, and the backward pass decodes it. Without a checkpoint, or if the policy does not name it,
it has no effect. JAX knows such rules in a private module: nothing else here imports one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.errors import UserError
from coat_jax.numerics.blocks import Blocks, from_blocks, to_blocks
from coat_jax.numerics.formats import E4M3
from coat_jax.ops.checks import require_real
from coat_jax.precision import Block
from coat_jax.validation import require

try:
    from jax._src.core import JaxprEqn, Var
    from jax._src.interpreters.partial_eval import (
        Offloadable,
        RecomputeType,
        ensure_enum,
        partial_eval_jaxpr_custom_rules,
    )
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"coat.save_fp8 works with JAX 0.10 to 0.12, and not with {jax.__version__}: {error}."
    ) from error

save = Primitive("save_fp8")  # the identity
encode = Primitive("encode_fp8")
decode = Primitive("decode_fp8")
encode.multiple_results = True


def save_fp8(
    x: Float[Array, "*rows D"],
    name: str,
    *,
    dtype: DTypeLike = E4M3,
    block: int = 16,
    stochastic: bool = True,
) -> Float[Array, "*rows D"]:
    """`x`, which a checkpoint whose policy has this name saves in FP8 blocks.

    Args:
        x: any array of the model, in BF16, FP16 or FP32.
        name: for `coat.policies.save_fp8`.
        dtype: of the codes: E4M3 (more precision) or E5M2 (more range).
        block: how many neighbours on the last axis share an exponent: 16, 32, 64 or 128.
        stochastic: rounds up or down at random, right on average, instead of to nearest.

    Example:
        >>> import coat_jax as coat, jax, jax.numpy as jnp
        >>> def layer(x, w):
        ...     h = coat.save_fp8(jnp.tanh(x @ w), "hidden")
        ...     return x + jnp.sin(h) @ w.T
        >>> layer = jax.checkpoint(layer, policy=coat.policies.save_fp8("hidden"))
        >>> x, w = jnp.ones((8, 32)), jnp.ones((32, 64)) / 32
        >>> jax.grad(lambda w: layer(x, w).sum())(w).shape
        (32, 64)
    """
    require_real("save_fp8", x, least_rank=1)
    require("block", block, Block)
    return save.bind(x, name=name, dtype=dtype, block=block, stochastic=stochastic)


def policy(
    *names: str, otherwise: Callable[..., Any] | None = None, offload: bool = False
) -> Callable[..., Any]:
    """A policy for `jax.checkpoint`: saves the arrays of `coat.save_fp8` with these names in FP8.

    Args:
        names: of `coat.save_fp8`.
        otherwise: the policy for everything else, such as
            `jax.checkpoint_policies.dots_saveable`; None recomputes it.
        offload: whether codes wait for the backward pass in pinned host memory.
    """
    found: Any = Offloadable("device", "pinned_host") if offload else True

    def decide(primitive: Any, *types: Any, **parameters: Any) -> Any:
        if primitive is save:
            return found if parameters["name"] in names else False
        return False if otherwise is None else otherwise(primitive, *types, **parameters)

    return decide


# --- The identity ----------------------------------------------------------------------------


@save.def_impl
def _same(x: Array, **how: Any) -> Array:
    return x


@save.def_abstract_eval
def _same_type(x: Any, **how: Any) -> Any:
    return x


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> tuple[Any, Any]:
    return save.bind(*primals, **how), tangents[0]


ad.primitive_jvps[save] = _derivative
batching.defvectorized(save)
mlir.register_lowering(save, lambda context, x, **how: [x])


def _split(
    saveable: Callable[..., Any],
    unknown: Sequence[bool],
    available: Sequence[bool],
    equation: Any,
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """The rule: what of an equation the forward and the backward pass evaluate, and what is saved.

    Returns:
        The equation of the forward pass, that of the backward pass, whether the result is unknown
        in the forward pass, whether the backward pass has it, and what it needs of the forward one.
    """
    (x,), how = equation.invars, equation.params
    if unknown[0]:
        return None, equation, [True], [True], [] if available[0] else [x]
    case = ensure_enum(saveable(save, x.aval, **how))
    if isinstance(case, RecomputeType):
        return equation, equation, [False], [True], [] if available[0] else [x]
    offload = isinstance(case, Offloadable)
    made = [Var(aval) for aval in _encoded(x.aval, offload=offload, **how)]
    of_encode = {name: value for name, value in how.items() if name != "name"}
    forward = equation.replace(
        primitive=encode,
        outvars=[*equation.outvars, *made],
        params=of_encode | {"offload": offload},
    )
    backward = equation.replace(
        primitive=decode,
        invars=made,
        params={"block": how["block"], "dtype": x.aval.dtype, "offload": offload},
    )
    return forward, backward, [False], [True], made


partial_eval_jaxpr_custom_rules[save] = _split


# --- Encoding and decoding ---------------------------------------------------------------------


def _encoded(x: Any, *, dtype: DTypeLike, block: int, offload: bool, **rest: Any) -> list[Any]:
    """The types of codes and exponents."""
    count = -(-x.shape[-1] // block)
    how = {"weak_type": False} | ({"memory_space": jax.memory.Space.Host} if offload else {})
    return [
        x.update(dtype=jnp.dtype(dtype), **how),
        x.update(shape=(*x.shape[:-1], count), dtype=jnp.dtype(jnp.uint8), **how),
    ]


@encode.def_abstract_eval
def _encode_types(x: Any, **how: Any) -> list[Any]:
    return [x, *_encoded(x, **how)]


def _encode(x: Array, *, dtype: DTypeLike, block: int, stochastic: bool, offload: bool) -> Any:
    made = to_blocks(x, dtype, size=block, stochastic=stochastic)
    if offload:
        made = jax.device_put(made, jax.memory.Space.Host)
    return (x, *made)


def _decode(codes: Array, exponents: Array, *, dtype: DTypeLike, block: int, offload: bool) -> Any:
    blocks = Blocks(codes, exponents)
    if offload:
        blocks = jax.device_put(blocks, jax.memory.Space.Device)
    return from_blocks(blocks, size=block).astype(dtype)


@decode.def_abstract_eval
def _decode_type(codes: Any, exponents: Any, *, dtype: DTypeLike, **how: Any) -> Any:
    return codes.update(dtype=jnp.dtype(dtype), memory_space=jax.memory.Space.Device)


def _refuse(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> Any:
    raise UserError(
        "An array that a checkpoint saves by coat.save_fp8 can be differentiated once only: its "
        "codes have no derivative. Leave its name out of the policy where you need Hessians."
    )


def _define(primitive: Primitive, function: Callable[..., Any]) -> None:
    several = primitive.multiple_results

    def run(*arrays: Array, **how: Any) -> Any:
        return jax.jit(partial(function, **how))(*arrays)

    def batched(arrays: Sequence[Any], axes: Sequence[int], **how: Any) -> Any:
        # Blocks lie along the last axis.
        first = [jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True)]
        made = primitive.bind(*first, **how)
        return made, [0] * len(made) if several else 0

    primitive.def_impl(run)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=several))
    ad.primitive_jvps[primitive] = _refuse
    batching.primitive_batchers[primitive] = batched


_define(encode, _encode)
_define(decode, _decode)

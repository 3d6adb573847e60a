"""FP8 residuals under `jax.checkpoint`: the backward pass reads named arrays as codes of 8 bits.

    h = coat.save_fp8(h, "hidden")                                    in a model: an identity
    f = jax.checkpoint(f, policy=coat.policies.save_fp8("hidden"))    around it: JAX's own

    forward     h itself, exact to the last bit; saves codes and exponents, 1.06 bytes a number
    backward    recomputes what depends on h from the decoded codes

`jax.checkpoint` asks its policy whether the result of an operation is saved or recomputed.
`save_fp8` has its own rule for this: where the policy says that it is saved, the forward pass also
encodes h, and the backward pass decodes it. Everywhere else it has no effect: without a checkpoint,
under a policy that does not name it, in forward-mode derivatives.

Such rules belong to a private module of JAX, which is imported here and nowhere else.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.errors import UserError
from coat_jax.numerics import eight_bits, mesh_axes
from coat_jax.numerics.blocks import Blocks, from_blocks, to_blocks
from coat_jax.numerics.explicit_axes import explicit_spec
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.noise import of_places, run_numbers
from coat_jax.ops.checks import require_real
from coat_jax.precision import Block
from coat_jax.validation import brief, require

try:
    from jax._src.core import Var
    from jax._src.interpreters.partial_eval import (
        Offloadable,
        RecomputeType,
        ensure_enum,
        partial_eval_jaxpr_custom_rules,
    )
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"coat.save_fp8 works with JAX 0.10 to 0.12, and this is JAX {jax.__version__}: {error}"
    ) from error

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

save_p = Primitive("save_fp8")  # the identity
encode_p = Primitive("encode_fp8")  # the identity, codes and scales
encode_p.multiple_results = True
decode_p = Primitive("decode_fp8")


def save_fp8(
    x: Float[Array, "*rows D"],
    name: str,
    *,
    dtype: DTypeLike = E4M3,
    block: int = 16,
    stochastic: bool = True,
) -> Float[Array, "*rows D"]:
    """Returns `x`. A checkpoint whose policy has this name saves it in 8 bits.

    Args:
        x: an array of a model, in BF16, FP16 or FP32.
        name: for `coat.policies.save_fp8`. Several arrays may share it.
        dtype: of the codes: E4M3 (more precision), E5M2 (more range), or INT8 with one scale for
            each row.
        block: how many neighbours on the last axis share an exponent of E4M3 or E5M2.
        stochastic: whether numbers are rounded up or down at random, right on average, instead of
            to nearest. The random bits depend only on an element's place in the array.

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
    if not isinstance(name, str):
        raise TypeError(f"save_fp8 takes a name as its second argument, not {brief(name)}.")
    if jnp.dtype(dtype) not in (E4M3, E5M2, jnp.int8):
        raise UserError(f"save_fp8 got dtype={brief(dtype)}. Use coat.E4M3, coat.E5M2 or jnp.int8.")
    require("block", block, Block)
    mesh = jax.typeof(x).sharding.mesh
    columns, parts = x.shape[-1], mesh_axes.shards(explicit_spec(x)[-1], mesh)
    if parts > 1 and columns // parts % block and jnp.dtype(dtype) != jnp.int8:
        raise UserError(
            f"save_fp8 got {name!r} with a last axis of {columns} in {parts} shards, which are no "
            f"multiple of block={block}. Shard another axis, or use smaller blocks."
        )
    kept: Array = save_p.bind(
        x, name=name, dtype=jnp.dtype(dtype), block=block, stochastic=stochastic
    )
    return kept


@dataclasses.dataclass(frozen=True)
class SaveFP8:
    """A policy for `jax.checkpoint`; made by `coat.policies.save_fp8`."""

    names: tuple[str, ...]
    otherwise: Callable[..., Any] | None
    offload: bool

    def __call__(self, primitive: Any, *types: Any, **parameters: Any) -> Any:
        """Whether the result of an operation is saved, recomputed or offloaded."""
        if primitive is save_p:
            saved: Any = Offloadable("device", "pinned_host") if self.offload else True
            return saved if parameters["name"] in self.names else False
        return self.otherwise is not None and self.otherwise(primitive, *types, **parameters)


# --- The identity, and its rule in a checkpoint -------------------------------------------------


def _name(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> tuple[Any, Any]:
    return save_p.bind(*primals, **how), tangents[0]  # the tangent has no name


def _split(
    policy: Callable[..., Any], unknown: Sequence[bool], available: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Divides an equation between the forward and the backward pass of a checkpoint.

    Args:
        policy: of the checkpoint.
        unknown: whether the operand is unknown in the forward pass.
        available: whether the backward pass has the operand.
        equation: of `save_p`.

    Returns:
        The equations of the forward and of the backward pass; whether the result is unknown in the
        forward pass, and available in the backward pass; and the residuals.
    """
    (x,), how = equation.invars, equation.params
    operand = [] if available[0] else [x]
    if unknown[0]:
        return None, equation, [True], [True], operand
    case = ensure_enum(policy(save_p, x.aval, **how))
    if isinstance(case, RecomputeType):
        return equation, equation, [False], [True], operand
    back = {"dtype": x.aval.dtype, "block": how["block"]}
    kinds = _residual_types(x.aval, **how)
    encode: Callable[..., Any] = partial(encode_p.bind, **how)
    decode: Callable[..., Any] = partial(decode_p.bind, **back)
    if isinstance(case, Offloadable):
        encode, decode = _to_host(encode), _from_host(decode)
        kinds = [kind.update(memory_space=HOST) for kind in kinds]
    residuals = [Var(kind) for kind in kinds]
    forward = _equation(encode, [x], [*equation.outvars, *residuals], equation)
    backward = _equation(decode, residuals, equation.outvars, equation)
    return forward, backward, [False], [True], residuals


def _equation(
    function: Callable[..., Any], operands: Sequence[Any], results: Sequence[Any], like: Any
) -> Any:
    """An equation that calls a function, from `like`, which it replaces."""
    program = jax.make_jaxpr(jax.jit(function, inline=False))(*(v.aval for v in operands))
    (call,) = program.jaxpr.eqns
    return call.replace(invars=[*operands], outvars=[*results], source_info=like.source_info)


def _to_host(encode: Callable[..., Any]) -> Callable[..., Any]:
    def encode_to_host(x: Array) -> Any:
        x, *residuals = encode(x)
        return x, *jax.device_put(residuals, HOST)

    return encode_to_host


def _from_host(decode: Callable[..., Any]) -> Callable[..., Any]:
    def decode_from_host(*residuals: Array) -> Any:
        return decode(*jax.device_put(residuals, DEVICE))

    return decode_from_host


save_p.def_impl(lambda x, **how: x)
save_p.def_abstract_eval(lambda x, **how: x)
ad.primitive_jvps[save_p] = _name
batching.defvectorized(save_p)
mlir.register_lowering(save_p, lambda context, x, **how: [x])
partial_eval_jaxpr_custom_rules[save_p] = _split

# --- Codes and scales ---------------------------------------------------------------------------


def _encode(
    x: Float[Array, "*rows D"],
    *,
    name: str,
    dtype: DTypeLike,
    block: int,
    stochastic: bool,
) -> tuple[Array, Array, Array]:
    """x itself, its codes, and an exponent for each block or a scale for each row."""
    del name
    if dtype == jnp.int8:
        magnitudes = jnp.abs(x.astype(jnp.float32))
        scales = eight_bits.scale_of(jnp.max(magnitudes, axis=-1, initial=0.0), "int8")
        codes = _round_rows(x, scales, stochastic)
    else:
        codes, scales = to_blocks(x, dtype, size=block, stochastic=stochastic)
    return x, codes, scales


def _round_rows(x: Float[Array, "*rows D"], scales: Float[Array, "*rows"], stochastic: bool) -> Any:
    if not stochastic:
        return eight_bits.encode(x, scales[..., None], "int8")
    bits = of_places(run_numbers(scales.shape), x.shape[-1])
    noise = (bits >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    y = jnp.floor(x.astype(jnp.float32) / scales[..., None] + noise)
    return eight_bits.encode(y, jnp.float32(1), "int8")


def _decode(
    codes: Array, scales: Array, *, dtype: DTypeLike, block: int
) -> Float[Array, "*rows D"]:
    if codes.dtype == jnp.int8:
        return (codes.astype(jnp.float32) * scales[..., None]).astype(dtype)
    return from_blocks(Blocks(codes, scales), size=block).astype(dtype)


def _residual_types(x: Any, *, dtype: DTypeLike, block: int, **rest: Any) -> list[Any]:
    """The types of codes and scales."""
    codes = x.update(dtype=dtype, weak_type=False)
    *rows, columns = x.shape
    if dtype != jnp.int8:
        return [codes, codes.update(shape=(*rows, -(-columns // block)), dtype=jnp.dtype("uint8"))]
    sharding = x.sharding.update(spec=x.sharding.spec[:-1])
    return [codes, codes.update(shape=(*rows,), dtype=jnp.dtype("float32"), sharding=sharding)]


def _decoded_type(codes: Any, scales: Any, *, dtype: DTypeLike, block: int) -> Any:
    return codes.update(dtype=dtype)


def _refuse(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> Any:
    raise UserError(
        "A function whose checkpoint saves arrays by coat.policies.save_fp8 can be differentiated "
        "once only: codes have no derivative. Use another policy where you need Hessians."
    )


def _define(primitive: Primitive, function: Callable[..., Any], types: Callable[..., Any]) -> None:
    several = primitive.multiple_results

    def run(*arrays: Array, **how: Any) -> Any:
        return jax.jit(partial(function, **how))(*arrays)

    def batched(arrays: Sequence[Any], axes: Sequence[int], **how: Any) -> Any:
        # Blocks and rows lie along the last axis.
        first = [jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True)]
        results = primitive.bind(*first, **how)
        return results, [0] * len(results) if several else 0

    primitive.def_impl(run)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=several))
    batching.primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = _refuse


_define(encode_p, _encode, lambda x, **how: [x, *_residual_types(x, **how)])
_define(decode_p, _decode, _decoded_type)

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
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax import probes
from coat_jax.errors import UserError
from coat_jax.numerics import eight_bits, mesh_axes
from coat_jax.numerics.blocks import Blocks, from_blocks, to_blocks
from coat_jax.numerics.explicit_axes import explicit_spec, shard_inside
from coat_jax.numerics.formats import E4M3, E5M2, named_format
from coat_jax.numerics.noise import of_places, run_numbers
from coat_jax.ops import recording
from coat_jax.ops.checks import require_real
from coat_jax.ops.definition import define_op, save_array
from coat_jax.ops.projection import Mode
from coat_jax.precision import Block, Precision
from coat_jax.validation import brief, require

try:
    from jax._src.core import Var
    from jax._src.interpreters.partial_eval import (
        Offloadable,
        RecomputeType,
        ensure_enum,
        partial_eval_jaxpr_custom_rules,
    )

    MISSING = ""
except ImportError as error:  # the rest of coat_jax does without
    MISSING = str(error)

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

save_p = Primitive("save_fp8")  # the identity
LABEL = "save_fp8"  # begins the name of the function that encodes an array


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
    if MISSING:
        raise UserError(
            f"coat.save_fp8 works with JAX 0.10 to 0.12, and this is JAX {jax.__version__}: "
            f"{MISSING}. Use one of these, or a newer coat_jax."
        )
    require_real("save_fp8", x, least_rank=1)
    if not isinstance(name, str):
        raise TypeError(f"save_fp8 takes a name as its second argument, not {brief(name)}.")
    known = named_format(dtype, jnp.int8)
    if known not in (E4M3, E5M2, jnp.int8):
        raise UserError(f"save_fp8 got dtype={brief(dtype)}. Use coat.E4M3, coat.E5M2 or jnp.int8.")
    stored = jnp.dtype(known)
    require("block", block, Block)
    mesh = jax.typeof(x).sharding.mesh
    columns, parts = x.shape[-1], mesh_axes.shards(explicit_spec(x)[-1], mesh)
    if parts > 1 and columns // parts % block and stored != jnp.int8:
        raise UserError(
            f"save_fp8 got {name!r} with a last axis of {columns} in {parts} shards, which are no "
            f"multiple of block={block}. Shard another axis, or use smaller blocks."
        )
    if probes.current_scope.value is not None and stored != jnp.int8:
        with probes.named(name):
            mode = Mode(Precision(fp8_linear=False, block=block), "xla")
            x = _watch(mode, (stored, stochastic), x)
    kept: Array = save_p.bind(x, name=name, dtype=stored, block=block, stochastic=stochastic)
    return kept


def _same(mode: Mode, dtype: DTypeLike, stochastic: bool, x: Float[Array, "*rows D"]) -> Any:
    """The identity, of which telemetry measures what `save_fp8` rounds."""

    def record() -> probes.Probe:
        block = mode.precision.block
        saved = save_array(x, dtype, block, stochastic=stochastic)
        return recording.blocks(("saved",), (x,), (saved,), block, dtype)

    return x, (), record


_watch = define_op("save_fp8", _same, lambda mode, *rest: ((rest[-1],), dict), blocks=("saved",))


@dataclasses.dataclass(frozen=True)
class SaveFP8:
    """A policy for `jax.checkpoint`; made by `coat.policies.save_fp8`."""

    names: tuple[str, ...]
    otherwise: Callable[..., Any] | None = None
    offload: bool = False

    def __call__(self, primitive: Any, *types: Any, **parameters: Any) -> Any:
        """Whether the result of an operation is saved, recomputed or offloaded."""
        if primitive is save_p:
            saved: Any = Offloadable("device", "pinned_host") if self.offload else True
            return saved if parameters["name"] in self.names else False
        return self.otherwise is not None and self.otherwise(primitive, *types, **parameters)


# --- The identity, and its rule in a checkpoint -------------------------------------------------


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> tuple[Any, Any]:
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
    name, *format = how["name"], how["dtype"], how["block"], how["stochastic"]
    offload = isinstance(case, Offloadable)
    decode = partial(_decode, dtype=x.aval.dtype, block=how["block"], offload=offload)
    label = f"{LABEL} {jnp.dtype(how['dtype']).name} {name}"
    forward = _call(label, partial(_encode, format=tuple(format), offload=offload), x.aval)
    backward = _call("decode", decode, *(v.aval for v in forward.outvars[1:]))
    residuals = [Var(v.aval) for v in forward.outvars[1:]]
    return (
        forward.replace(invars=[x], outvars=[*equation.outvars, *residuals]),
        backward.replace(invars=residuals, outvars=equation.outvars),
        [False],
        [True],
        residuals,
    )


def _call(name: str, function: Callable[..., Any], *types: Any) -> Any:
    """The equation that calls a jitted function, to which JAX gives this name."""

    def named(*arrays: Array) -> Any:
        return function(*arrays)

    named.__name__ = named.__qualname__ = name
    (equation,) = jax.make_jaxpr(jax.jit(named))(*types).jaxpr.eqns
    return equation


save_p.def_impl(lambda x, **how: x)
save_p.def_abstract_eval(lambda x, **how: x)
ad.primitive_jvps[save_p] = _derivative
batching.defvectorized(save_p)
mlir.register_lowering(save_p, lambda context, x, **how: [x])
if not MISSING:
    partial_eval_jaxpr_custom_rules[save_p] = _split

# --- Codes and scales ---------------------------------------------------------------------------

Format = tuple[Any, int, bool]  # dtype, block, stochastic


def _encode(x: Float[Array, "*rows D"], *, format: Format, offload: bool) -> Any:
    """x itself, its codes, and an exponent for each block or a scale for each row."""
    *rows, columns = explicit_spec(x)
    last = [] if format[0] == jnp.int8 else [columns]
    specs = PartitionSpec(*rows, columns), PartitionSpec(*rows, *last)
    codes, scales = shard_inside(partial(_round, format), lambda: specs, x)
    if offload:
        codes, scales = jax.device_put((codes, scales), HOST)
    return x, codes, scales


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _round(format: Format, x: Float[Array, "*rows D"]) -> tuple[Array, Array]:
    dtype, block, stochastic = format
    if dtype == jnp.int8:
        magnitudes = jnp.abs(x.astype(jnp.float32))
        scales = eight_bits.scale_of(jnp.max(magnitudes, axis=-1, initial=0.0), "int8")
        return _round_rows(x, scales, stochastic), scales
    blocks = to_blocks(x, dtype, size=block, stochastic=stochastic)
    return blocks.codes, blocks.exponents


def _round_rows(x: Float[Array, "*rows D"], scales: Float[Array, "*rows"], stochastic: bool) -> Any:
    if not stochastic:
        return eight_bits.encode(x, scales[..., None], "int8")
    bits = of_places(run_numbers(scales.shape), x.shape[-1])
    noise = (bits >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    y = jnp.floor(x.astype(jnp.float32) / scales[..., None] + noise)
    return eight_bits.encode(y, jnp.float32(1), "int8")


def _decode(
    codes: Array, scales: Array, *, dtype: DTypeLike, block: int, offload: bool
) -> Float[Array, "*rows D"]:
    if offload:
        codes, scales = jax.device_put((codes, scales), DEVICE)

    def decode(codes: Array, scales: Array) -> Array:
        if codes.dtype == jnp.int8:
            return (codes.astype(jnp.float32) * scales[..., None]).astype(dtype)
        return from_blocks(Blocks(codes, scales), size=block).astype(dtype)

    decoded: Array = shard_inside(
        decode, lambda: PartitionSpec(*explicit_spec(codes)), codes, scales
    )
    return decoded


@_round.defjvp
def _refuse(format: Format, primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "A function whose checkpoint saves arrays in FP8 (by coat.policies.save_fp8 or "
        "coat.ops.recompute) can be differentiated once only: codes have no derivative. Use "
        "another policy where you need Hessians."
    )

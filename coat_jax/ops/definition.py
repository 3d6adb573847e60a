"""Defines an op: a function on arrays with a gradient of its own, and what it saves for that.

**The backward pass begins when the gradient arrives.** A barrier ties the residuals to the
gradient. Without it, XLA would see that the backward pass recomputes values of the forward pass,
and keep these in memory instead of the smaller residuals.

**Under vmap, all outputs of an op have a batch, or none.** JAX does not batch an output that does
not depend on what is mapped over. It sums the gradient of this output over the batch, and passes
the sum to the backward pass of each element, whose results it sums again. So if one output has a
batch, `batch_alike` gives one to all.

**The backward pass cannot be differentiated.** Rounding has no second derivative, so asking for one
is an error.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax import probes
from coat_jax.kernels.sharding import as_3d
from coat_jax.numerics.blocks import Blocks, from_blocks, to_blocks
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, shard_inside
from coat_jax.ops.projection import Mode
from coat_jax.precision import Precision
from coat_jax.probes import OptionalProbe, Probe

SavedArray = Blocks | Array
Static = tuple[Any, ...]  # hashable settings
Record = Callable[[], Probe]  # returns the statistics of tensors, by name


def define_op(
    name: str,
    forward: Callable[..., tuple[Any, tuple[Any, ...], Record]],
    backward: Callable[..., tuple[tuple[Any, ...], Record]],
    *,
    blocks: tuple[str, ...] = (),
    size: Literal["block", "attention_block"] = "block",
    operands: tuple[str, ...] = (),
    weights: tuple[str, ...] | None = None,
    specs: Callable[..., Any] | None = None,
    in_3d: bool = False,
) -> Callable[..., Any]:
    """Returns an op: a function of (mode, static, *arrays), where `static` is a tuple.

    With telemetry the op also has a probe, an argument whose gradient is what `record()` returns:
    the statistics of the tensors that the forward or the backward pass rounded. Without telemetry,
    `record` is not called.

    Args:
        name: of the op, for errors and telemetry.
        forward: (mode, *static, *arrays) -> result, residuals, record.
        backward: (mode, *static, *residuals, gradient) -> gradients of the arrays, record.
        blocks: the names of the tensors that it saves in FP8 blocks.
        size: the field of `Precision` with the size of these blocks; None for none.
        operands: the names of the inputs of its products, which `mode` may round.
        weights: the names of its weights; None if they are those of the second argument,
            `Layers`, and are numbered.
        specs: (*static, *arrays) -> the PartitionSpecs of the result over explicit axes of a mesh;
            None for an op that is not used on them.
        in_3d: whether the op takes its first array as [B, S, D], and returns results with these
            rows. Arrays of any rank are then accepted.
    """

    def tensors(mode: Mode) -> tuple[str, ...]:
        saved = () if getattr(mode.precision, size) is None else blocks
        return saved if mode.format is None else (*saved, *operands)

    def probe_of(mode: Mode, arrays: tuple[Any, ...]) -> OptionalProbe:
        if mode.format is None or not operands:
            return probes.probe(name, tensors(mode))
        names = weights
        if names is None:
            count = len(arrays[1].weights)
            names = tuple(map(str, range(count))) if count > 1 else ("",)
        return probes.probe(name, tensors(mode), names, ("weight", "gradient"))

    def run(mode: Mode, static: Static, *arrays_and_probe: Any) -> Any:
        return forward(mode, *static, *arrays_and_probe[:-1])[0]

    def save(mode: Mode, static: Static, *arrays_and_probe: Any) -> tuple[Any, tuple[Any, ...]]:
        *arrays, probe = arrays_and_probe
        result, residuals, record = forward(mode, *static, *arrays)
        return result, (*residuals, probe and _record(probe, record))

    def differentiate(
        mode: Mode, static: Static, saved: tuple[Any, ...], gradient: Any
    ) -> tuple[Any, ...]:
        def pull(*saved_and_gradient: Any) -> tuple[Any, ...]:
            *residuals, probe, gradient = saved_and_gradient
            gradients, record = backward(mode, *static, *residuals, gradient)
            return *gradients, probe and _record(probe, record)

        # The gradient that is used bypasses the barrier, which would hide its sharding.
        saved, _ = lax.optimization_barrier((saved, gradient))
        once = tensors(mode)
        return (differentiable_once(name, pull) if once else pull)(*saved, gradient)

    run.__name__ = name
    differentiable = jax.custom_vjp(run, nondiff_argnums=(0, 1))
    differentiable.defvjp(save, differentiate)

    def op(mode: Mode, static: Static, *arrays: Any) -> Any:
        probe = None if probes.current_scope.value is None else probe_of(mode, arrays)
        call = partial(differentiable, mode, static)
        if in_3d and arrays[0].ndim != 3:
            call = partial(_on_rows, call)
        if specs is None:
            return call(*arrays, probe)
        return shard_inside(call, partial(specs, *static, *arrays), *arrays, probe)

    return op


def differentiable_once(
    name: str, backward: Callable[..., Any], remedy: str = "precision=coat.BF16"
) -> Callable[..., Any]:
    """Returns the backward pass of an op in FP8, which refuses to be differentiated itself."""
    guarded = jax.custom_jvp(backward)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            f"coat.ops.{name} in FP8 can be differentiated once only: rounding to FP8 has no "
            f"second derivative. Use {remedy} where you need Hessians."
        )

    return guarded


def _record(probe: Probe, record: Record) -> Probe:
    return {name: sums for name, sums in (probe | record()).items() if name in probe}


def _on_rows(op: Callable[..., Any], x: Float[Array, "*rows D"], *rest: Any) -> Any:
    results = op(as_3d(x), *rest)
    return jax.tree.map(lambda y: y.reshape(*x.shape[:-1], y.shape[-1]), results)


def like_first(x: Array, *_: Any) -> PartitionSpec:
    """The `specs` of an op whose result is sharded like its first array."""
    return merge_specs(*explicit_spec(x))


@custom_vmap
def _outputs(*outputs: Array) -> tuple[Array, ...]:
    """Returns the outputs of a forward pass; under vmap, if one is batched, all are."""
    return outputs


# A custom_vmap has no derivative of its own.
batch_alike = jax.custom_jvp(_outputs)
batch_alike.defjvp(lambda primals, tangents: (batch_alike(*primals), tangents))


@_outputs.def_vmap
def _broadcast(
    size: int, batched: tuple[bool, ...], *outputs: Array
) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
    whole = tuple(
        y if has_batch else jnp.broadcast_to(y, (size, *y.shape))
        for y, has_batch in zip(outputs, batched, strict=True)
    )
    return whole, (True,) * len(whole)


# --- What is saved of an array ---------------------------------------------------------------


def save_array(
    x: Float[Array, "*rows D"],
    dtype: DTypeLike,
    size: int | None,
    *,
    stochastic: bool = False,
    antithetic: bool = False,
) -> SavedArray:
    """`x` in FP8 blocks of `size`, or `x` itself if size is None.

    Args:
        x: what to save.
        dtype: an FP8 format.
        size: how many elements share a scale.
        stochastic: whether codes are rounded stochastically.
        antithetic: whether to round by the complement of the random bits, so that the errors of
            two arrays that are multiplied partly cancel.
    """
    if size is None:
        return x
    return to_blocks(x, dtype, size=size, stochastic=stochastic, antithetic=antithetic)


def restore(saved: SavedArray, dtype: DTypeLike, size: int | None) -> Float[Array, "*rows D"]:
    """The saved array, decoded, as `dtype`."""
    if isinstance(saved, Blocks):
        assert size is not None
        return from_blocks(saved, size=size).astype(dtype)
    return saved.astype(dtype)


def save_inputs(
    inputs: Sequence[Float[Array, "*rows D"]], precision: Precision
) -> tuple[tuple[SavedArray, ...], list[Array]]:
    """The inputs of a norm or an activation as they are saved, and FP32 values to compute with.

    With `Precision.exact_forward` these are the original values, and saved ones are rounded
    stochastically if `Precision.stochastic` is set, since only the backward pass sees them.
    """
    size, stochastic = precision.block, precision.saves_stochastically
    saved, values = [], []
    for i, x in enumerate(inputs):
        antithetic = i > 0  # gate and up are multiplied
        of_x = save_array(x, precision.forward, size, stochastic=stochastic, antithetic=antithetic)
        saved.append(of_x)
        values.append(restore(x if precision.exact_forward else of_x, jnp.float32, size))
    return tuple(saved), values

"""Orthogonalizes matrices with Newton-Schulz iterations, each matrix on one device of the mesh.

    x <- x / |x|                                 Frobenius norm, so that no singular value exceeds 1
    x <- (a I + b A + c A^2) x,   A = x x^T      `steps` times, in BF16 with FP32 sums

For x = U S V^T this approaches U V^T. The usual coefficients do not converge: after only five steps
they leave singular values between about 0.7 and 1.2, which is close enough.

On a mesh, XLA by itself would gather every matrix on every device, and every device would compute
all products. Here matrices of one shape are stacked, and all-to-alls, one for each mesh axis, give
each device its share of whole matrices: their number divided by the number of devices, rounded up.
The same number returns them. The size of a stack is limited, so that its copies take little memory,
and so that one stack can be communicated while another is multiplied.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels.sharding import run_placed
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, shard_inside
from coat_jax.numerics.formats import SMALLEST_NORMAL
from coat_jax.numerics.mesh_axes import automatic_mesh
from coat_jax.validation import Count, require

Coefficients = tuple[float, float, float] | tuple[tuple[float, float, float], ...]
Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]
TOGETHER = 1 << 26  # elements of the matrices that one device multiplies at the same time
STACKED = 1 << 28  # elements of one device's share of a stack

STANDARD: Coefficients = (3.4445, -4.7750, 2.0315)
DION: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
NS_DTYPES = (jnp.bfloat16, jnp.float32, jnp.float64)
PRESETS = {"standard": STANDARD, "dion": DION}  # the names that optax has for them
Preset = Literal["standard", "dion"]


def orthogonalize(
    stacks: Sequence[Float[Array, "B M N"]],
    coefficients: list[list[float]],
    *,
    eps: ArrayLike,
    preconditioning: Preconditioning,
    dtype: DTypeLike,
) -> list[Float[Array, "B M N"]]:
    """Orthogonalizes every matrix of every stack, and returns them in `dtype`.

    Args:
        stacks: arrays of matrices. Stacks may differ in all axes.
        coefficients: a, b, c of each step.
        eps: keeps zeros from being divided by zero; added to the Frobenius norm.
        preconditioning: how singular values are made at most 1 before the steps.
        dtype: the dtype of the products' operands.
    """
    op = partial(_orthogonalize_stacks, coefficients, preconditioning, dtype)
    eps = jnp.maximum(jnp.asarray(eps, jnp.float32), SMALLEST_NORMAL)  # the divisor of zeros

    def result() -> list[PartitionSpec]:
        return [merge_specs(*explicit_spec(stack)) for stack in stacks]

    results: list[Array] = shard_inside(op, result, list(stacks), eps)
    return results


def _orthogonalize_stacks(
    coefficients: list[list[float]],
    preconditioning: Preconditioning,
    dtype: DTypeLike,
    stacks: Sequence[Float[Array, "B M N"]],
    eps: Float[Array, ""],
) -> list[Float[Array, "B M N"]]:
    run = partial(_map, partial(_orthogonalize, coefficients, eps, preconditioning))
    results: list[list[Array]] = [[] for _ in stacks]
    for parts in _of_one_shape(stacks):
        slices = [stacks[i][part].astype(dtype) for i, part in parts]
        ends = np.cumsum([len(each) for each in slices])
        done = _on_one_device_each(run, slices)
        for (i, _), result in zip(parts, jnp.split(done, ends[:-1]), strict=True):
            results[i].append(result)
    return [
        jnp.concatenate(parts) if parts else stack.astype(dtype)  # a stack of no matrices
        for stack, parts in zip(stacks, results, strict=True)
    ]


def _of_one_shape(stacks: Sequence[Float[Array, "B M N"]]) -> Iterator[list[tuple[int, slice]]]:
    """Which matrices of which stacks to put into each new stack, all of one shape."""
    devices = max(jax.sharding.get_abstract_mesh().size, 1)
    for shape in dict.fromkeys(x.shape[1:] for x in stacks):
        most = devices * max(1, STACKED // max(shape[0] * shape[1], 1))
        parts, room = [], most
        for i, x in enumerate(stacks):
            begin = 0
            while x.shape[1:] == shape and begin < x.shape[0]:
                end = min(begin + room, x.shape[0])
                parts.append((i, slice(begin, end)))
                room -= end - begin
                begin = end
                if not room:
                    yield parts
                    parts, room = [], most
        if parts:
            yield parts


def coefficients_of(given: Coefficients | str, steps: int) -> list[list[float]]:
    """a, b, c of each step."""
    require("ns_steps", steps, Count)
    if isinstance(given, str):
        given = PRESETS[require("ns_coeffs", given, Preset)]
    rows = np.asarray(given, np.float32)
    if rows.ndim not in (1, 2) or rows.shape[-1:] != (3,):
        raise ValueError(
            f"ns_coeffs has shape {rows.shape}; it must be three numbers, or three for each step."
        )
    return (np.broadcast_to(rows, (steps, 3)) if rows.ndim == 1 else rows).tolist()


def checked_dtype(ns_dtype: DTypeLike) -> np.dtype:
    """The dtype of the products' operands; raises unless it has FP32's range."""
    dtype = jnp.dtype(ns_dtype)
    if dtype not in NS_DTYPES:
        raise ValueError(
            f"ns_dtype={dtype.name} must be bfloat16 or float32; other floats have a smaller range "
            "than gradients."
        )
    return dtype


def _orthogonalize(
    coefficients: list[list[float]],
    eps: ArrayLike,
    preconditioning: Preconditioning,
    x: Float[Array, "M N"],
) -> Float[Array, "M N"]:
    """Orthogonalizes one matrix; a tall one transposed, so that its Gram matrix is smaller."""
    if x.shape[0] > x.shape[1]:
        return _orthogonalize(coefficients, eps, preconditioning, x.T).T
    if preconditioning == "frobenius":
        wide = x.astype(jnp.float32)
        x = (wide / (jnp.sqrt(jnp.sum(jnp.square(wide))) + eps)).astype(x.dtype)
        gram = x @ x.T
    else:
        x, gram = _precondition(x, eps, preconditioning)
    identity = jnp.eye(x.shape[0], dtype=x.dtype)
    for step, (a, b, c) in enumerate(coefficients):
        if step:
            gram = x @ x.T
        # a x + (b A + c A^2) x would read and write x once more.
        x = (a * identity + b * gram + c * (gram @ gram)) @ x
    return x


def _precondition(
    x: Float[Array, "M N"], eps: ArrayLike, how: Preconditioning
) -> tuple[Float[Array, "M N"], Float[Array, "M M"]]:
    """`x` with singular values of at most 1, and its Gram matrix, which the first step needs."""
    wide = x.astype(jnp.float32)
    x = (wide / jnp.maximum(jnp.max(jnp.abs(wide)), eps)).astype(x.dtype)
    gram = jnp.matmul(x, x.T, preferred_element_type=jnp.float32)
    if how == "aol":
        squared = jnp.sum(jnp.abs(gram), axis=-1)[:, None]  # of each row
    elif how == "spectral":
        squared = jnp.linalg.eigvalsh(gram)[-1]
    else:
        squared = jnp.sqrt(jnp.sum(jnp.square(gram)))
    s = jnp.broadcast_to(lax.rsqrt(jnp.maximum(squared, eps)), (x.shape[0], 1))
    return (x.astype(jnp.float32) * s).astype(x.dtype), (gram * s * s.T).astype(x.dtype)


def _map(one: Callable[[Array], Array], stack: Float[Array, "B M N"]) -> Float[Array, "B M N"]:
    """Applies `one` to each matrix in place: to small ones together, to large ones in turn."""
    together = max(1, TOGETHER // max(stack.shape[1] * stack.shape[2], 1))
    if together >= stack.shape[0]:
        return jax.vmap(one)(stack)

    def update(begin: ArrayLike, count: int, stack: Array) -> Array:
        done = jax.vmap(one)(lax.dynamic_slice_in_dim(stack, begin, count))
        return lax.dynamic_update_slice_in_dim(stack, done, begin, 0)

    groups, rest = divmod(stack.shape[0], together)
    stack = lax.fori_loop(0, groups, lambda i, x: update(i * together, together, x), stack)
    return update(stack.shape[0] - rest, rest, stack) if rest else stack


def _on_one_device_each(
    run: Callable[[Array], Array], slices: Sequence[Float[Array, "B M N"]]
) -> Float[Array, "B M N"]:
    """Applies `run` to one stack of `slices`, distributed over the devices of the mesh, if any.

    Zeros fill up the stack to a multiple of the number of devices.
    """
    mesh = automatic_mesh()
    if mesh is None:
        return run(jnp.concatenate(slices))
    # The whole stack is sharded like the first slice: of several shardings XLA chooses none.
    stack = jnp.concatenate([slices[0], *map(_sharded_as_used, slices[1:])])
    free = PartitionSpec.UNCONSTRAINED
    axes = mesh.axis_names[::-1]  # the axes of a PartitionSpec's entry leave it from the last on
    # XLA moves a mesh axis from one axis of an array to another by an all-to-all, but several axes
    # at once by gathering the array. So they move to the axis of the matrices one by one.
    stages = [PartitionSpec(axes[:count], free, free) for count in range(len(axes) + 1)]
    x = jnp.pad(stack, [(0, -stack.shape[0] % mesh.size), (0, 0), (0, 0)])
    for stage in stages:
        x = lax.with_sharding_constraint(x, stage)
    by_matrix = PartitionSpec(axes)
    x = jax.shard_map(run, in_specs=by_matrix, out_specs=by_matrix, check_vma=False)(x)
    for stage in stages[::-1]:
        x = lax.with_sharding_constraint(x, stage)
    return x[: stack.shape[0]]


@custom_partitioning
def _as_used(x: Float[Array, "B M N"]) -> Float[Array, "B M N"]:
    return x


_as_used.def_partition(
    lambda mesh, _, result: (mesh, lambda x: x, result.sharding, (result.sharding,)),
    sharding_rule="b m n -> c p q",
)


@jax.custom_batching.custom_vmap
def _resharded(x: Float[Array, "B M N"]) -> Float[Array, "B M N"]:
    """`x`, sharded as its use requires: the use does not see how `x` is sharded."""
    # XLA can compare the shardings of two such calls. That of another operation may be in another
    # notation, and XLA then gathers the array.
    (x,) = run_placed(lambda _, x: (x,), [x], ["b m n"], ["b m n"])
    return _as_used(x)


_resharded.def_vmap(lambda _, batched, x: (x, *batched))
_sharded_as_used = jax.custom_jvp(_resharded)
_sharded_as_used.defjvp(lambda primals, tangents: (_sharded_as_used(*primals), *tangents))

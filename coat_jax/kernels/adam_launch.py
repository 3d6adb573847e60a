"""Launches the AdamW kernel: decides which leaves share a launch, and sets the kernel's constants.

A program steps one block of 1024 neighbouring elements. A leaf of a million elements or more has a
launch of its own. Smaller leaves of the same dtypes go eight to a launch, so that a model of many
small arrays does not wait for many small launches. The step is in place: parameters and moments are
overwritten where the caller donates them.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt32

from coat_jax.kernels import dispatch
from coat_jax.kernels.adam import (
    NUMBER,
    Hyper,
    Leaf,
    LeafResult,
    Settings,
    StepNumbers,
    adam_reference,
    numbers_of_step,
)
from coat_jax.kernels.launch import launch
from coat_jax.kernels.leaf_layout import layout_of
from coat_jax.kernels.leaf_sharding import LeafShard, run_sharded_leaves
from coat_jax.kernels.moment_format import MomentFormat, moment_format
from coat_jax.numerics import mesh_axes, noise
from coat_jax.numerics.expansion import Expanded

WARPS = 2
BUCKET = 8  # small leaves per launch
SMALL = 2**20  # a leaf with fewer elements is small


class StepConstants(NamedTuple):
    """The constants of the kernel."""

    has_param: bool
    nesterov: bool
    eps_root: bool  # whether it is not zero
    round_param: bool
    may_skip: bool
    mu: MomentFormat
    nu: MomentFormat
    number: StepNumbers = NUMBER


def adam_step(
    leaves: Sequence[Leaf],
    count: Int[Array, ""],
    hyper: Hyper,
    settings: Settings,
    *,
    ids: Sequence[int] | None = None,
    decayed: Sequence[bool] | None = None,
    dtypes: Sequence[np.dtype] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> list[LeafResult]:
    """Steps every leaf.

    Args:
        leaves: the arrays.
        count: the number of this step, from 1.
        hyper: learning rate, decay rates and so on.
        settings: formats and rounding.
        ids: one number per leaf that seeds its rounding (`noise.leaf_ids`); by default its index.
        decayed: per leaf, whether weight decay applies; all by default.
        dtypes: per leaf, that of its direction; by default its gradient's.
        implementation: see `dispatch`.
    """
    ids = range(len(leaves)) if ids is None else ids
    decayed = [True] * len(leaves) if decayed is None else decayed
    dtypes = [leaf.grad.dtype for leaf in leaves] if dtypes is None else dtypes
    stepped: dict[int, LeafResult] = {}
    waiting: list[int] = []
    chosen = dispatch.choose(implementation)
    if settings.storage.simulated:
        if implementation == "triton":
            raise ValueError(
                'implementation="triton" stores moments in 8 bits, and this Storage has simulated '
                "formats. Leave implementation out: XLA simulates any format."
            )
        chosen = "xla"
    arrays = {k: v for k, v in hyper._asdict().items() if not isinstance(v, int | float)}
    numbers = tuple((k, v) for k, v in hyper._asdict().items() if k not in arrays)
    for i, leaf in enumerate(leaves):
        in_fp32 = leaf.mu.codes.dtype == jnp.float32
        in_fp64 = leaf.param is not None and leaf.param.dtype == jnp.float64
        if in_fp64 and not in_fp32 and implementation == "triton":
            raise ValueError(
                "The Triton kernel steps parameters of up to 32 bits, and these are float64. Use "
                'implementation=None or "xla".'
            )
        # FP32 leaves are small: XLA fuses their steps, even those of several leaves.
        if chosen == "xla" or in_fp32 or in_fp64 or leaf.grad.size == 0:
            key = noise.leaf_key(settings.storage.seed, count, ids[i], *jax.tree.leaves(leaf))
            rest = settings, key, decayed[i], dtypes[i]
            if chosen == "xla":
                stepped[i] = adam_reference(leaf, count, hyper, *rest)
            else:
                stepped[i] = _reference_traced_once(leaf, count, arrays, numbers, *rest)
        else:
            waiting.append(i)
    if waiting:
        of_step = numbers_of_step(
            count,
            hyper,
            nesterov=settings.nesterov,
            has_param=leaves[waiting[0]].param is not None,
            smallest_v=settings.storage.resolution_of_second(),
        )
        keys = _keys(settings.storage.seed, count, ids, leaves)
        constants = _constants(hyper, settings, has_param=leaves[waiting[0]].param is not None)
        for bucket in _buckets(waiting, leaves, dtypes):
            table = jnp.array([(i, decayed[i]) for i in bucket], jnp.int32)
            results = _step_together(
                [leaves[i] for i in bucket],
                table,
                of_step,
                keys,
                dtype=dtypes[bucket[0]],
                constants=constants,
                group_size=settings.storage.group_size,
            )
            stepped.update(zip(bucket, results, strict=True))
    return [stepped[i] for i in range(len(leaves))]


@functools.partial(jax.jit, static_argnames=("numbers", "settings", "decayed", "dtype"))
def _reference_traced_once(
    leaf: Leaf,
    count: Int[Array, ""],
    arrays: dict[str, Array],
    numbers: tuple[tuple[str, Any], ...],
    settings: Settings,
    key: UInt32[Array, ""],
    decayed: bool,
    dtype: np.dtype,
) -> LeafResult:
    """`adam_reference`, traced and lowered once for all leaves of one shape: many are alike.

    Each hyperparameter is one of the arrays, or one of the numbers: a constant of the program.
    """
    hyper = Hyper(**arrays, **dict(numbers))
    return adam_reference(leaf, count, hyper, settings, key, decayed, dtype)


def _keys(
    seed: int, count: Int[Array, ""], ids: Sequence[int], leaves: Sequence[Leaf]
) -> UInt32[Array, " leaves"]:
    """The keys of all leaves; different ones for the shards inside a `shard_map`."""
    arrays = [jax.tree.leaves(leaf) for leaf in leaves]
    if not any(mesh_axes.varying_axes(*a) for a in arrays):
        return noise.leaf_key(seed, count, ids)
    return jnp.stack(
        [noise.leaf_key(seed, count, leaf, *a) for leaf, a in zip(ids, arrays, strict=True)]
    )


def _buckets(
    indices: Sequence[int], leaves: Sequence[Leaf], dtypes: Sequence[np.dtype]
) -> list[list[int]]:
    """Groups small leaves of the same dtypes, BUCKET at a time; all others stand alone."""
    alike: dict[tuple, list[int]] = {}
    alone = []
    for i in indices:
        leaf = leaves[i]
        if leaf.grad.size >= SMALL:
            alone.append([i])
        else:
            of_result = dtypes[i] if leaf.param is None else leaf.param.dtype
            key = leaf.grad.dtype, of_result, leaf.correction is None
            alike.setdefault(key, []).append(i)
    buckets = []
    for together in alike.values():
        full = len(together) // BUCKET * BUCKET
        buckets += [together[k : k + BUCKET] for k in range(0, full, BUCKET)]
        alone += [[i] for i in together[full:]]
    return alone + buckets


def _constants(hyper: Hyper, settings: Settings, *, has_param: bool) -> StepConstants:
    storage = settings.storage
    resolution = storage.resolution_of_second()
    return StepConstants(
        has_param=has_param,
        nesterov=settings.nesterov,
        eps_root=not (isinstance(hyper.eps_root, int | float) and hyper.eps_root == 0),
        round_param=settings.round_params,
        may_skip=hyper.skip is not False,
        mu=moment_format(storage.first, storage.rounding_of_first(hyper.b1), resolution),
        nu=moment_format(
            storage.second, "stochastic" if storage.stochastic else "nearest", resolution
        ),
    )


# Under jit a launch is traced once for all buckets of the same shapes. XLA inlines it.
@functools.partial(jax.jit, static_argnames=("dtype", "constants", "group_size"))
def _step_together(
    leaves: Sequence[Leaf],
    table: Int32[Array, "leaves 2"],
    numbers: Float[Array, " numbers"],
    keys: UInt32[Array, "..."],
    *,
    dtype: np.dtype,
    constants: StepConstants,
    group_size: int,
) -> list[LeafResult]:
    """Steps one leaf, or BUCKET of them, in one launch; `table` has (index, decayed) of each.

    Directions have the `dtype`.
    """
    corrected = leaves[0].correction is not None
    # Without parameters the kernel does not read the first pointer.
    arrays = [
        [leaf.grad if leaf.param is None else leaf.param, leaf.grad, *leaf.mu, *leaf.nu]
        + ([] if leaf.correction is None else [leaf.correction])
        for leaf in leaves
    ]
    inputs_per_leaf, results_per_leaf = (9, 8) if corrected else (8, 7)
    in_bfloat16 = arrays[0][0].dtype == jnp.bfloat16
    constants = constants._replace(round_param=constants.round_param and in_bfloat16)

    def on_shards(
        shared: Sequence[Array], local: Sequence[Sequence[Array]], shards: Sequence[LeafShard]
    ) -> list[list[Array]]:
        from coat_jax.kernels.triton.adam import STEPS

        numbers, keys, table = shared
        layout, programs, constants_of_leaves = layout_of(shards, table, group_size)
        aliases = {}
        for i in range(len(local)):
            first_in, first_out = 3 + inputs_per_leaf * i, results_per_leaf * i
            if constants.has_param:
                aliases[first_in] = first_out
            aliases |= {first_in + k: first_out + k - 1 for k in range(2, inputs_per_leaf)}
        results = launch(
            STEPS[corrected, len(local) == 1],
            numbers,
            keys,
            layout,
            *(a for leaf in local for a in leaf),
            outputs=[
                result
                for param, _, *moments in local
                for result in (
                    jax.ShapeDtypeStruct(
                        param.shape, param.dtype if constants.has_param else dtype
                    ),
                    *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in moments),
                )
            ],
            aliases=aliases,
            programs=programs,
            warps=WARPS,
            STEP=constants,
            LEAVES=constants_of_leaves,
        )
        return [results[k : k + results_per_leaf] for k in range(0, len(results), results_per_leaf)]

    stepped = run_sharded_leaves(on_shards, [numbers, keys, table], arrays, group_size=group_size)
    return [LeafResult(r[0], Expanded(*r[1:4]), Expanded(*r[4:7]), *r[7:]) for r in stepped]

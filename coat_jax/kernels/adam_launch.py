"""Launches the AdamW kernel: which leaves share a launch, and what the kernel is told.

A program steps one block of 1024 neighbours. A leaf of a million elements or more has a
launch of its own; smaller ones of the same dtypes go eight to a launch, so that a model of
many small arrays does not wait for many small launches. Everything is in place: parameters
and moments are overwritten where the caller donates them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32, UInt32

from coat_jax.kernels import dispatch
from coat_jax.kernels.adam import (
    Hyper,
    Leaf,
    Settings,
    Stepped,
    adam_reference,
    numbers_of_step,
    step_block,
)
from coat_jax.kernels.launch import kernel, launch
from coat_jax.kernels.partition import LeafPlace, over_mesh
from coat_jax.numerics import logarithms, noise
from coat_jax.numerics.expansion import Expanded, Rounding, fit_of
from coat_jax.numerics.formats import format_of
from coat_jax.storage import DIRECTION, LOGARITHM, Storage

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024
WARPS = 2
BUCKET = 8  # leaves per launch, where they are small
SMALL = 2**20  # elements
ROUNDINGS = ("nearest", "dithered", "stochastic")  # the kernel knows them by number
MAX_JUMPS = 3
LAYOUT_FIELDS = 7 + 2 * MAX_JUMPS  # the kernel knows them by number


def adam_step(
    leaves: Sequence[Leaf],
    count: Int[Array, ""],
    hyper: Hyper,
    settings: Settings,
    *,
    ids: Sequence[int] | None = None,
    decayed: Sequence[bool] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> list[Stepped]:
    """Steps every leaf.

    Args:
        leaves: the arrays.
        count: the number of this step, from 1.
        hyper: learning rate, decay rates and so on.
        settings: formats and rounding.
        ids: one number per leaf that seeds its rounding (`noise.leaf_ids`); by default its place.
        decayed: per leaf, whether weight decay applies; all by default.
        implementation: see `dispatch`.
    """
    ids = range(len(leaves)) if ids is None else ids
    decayed = [True] * len(leaves) if decayed is None else decayed
    stepped: dict[int, Stepped] = {}
    waiting: list[int] = []
    chosen = dispatch.choose(implementation)
    for i, leaf in enumerate(leaves):
        in_fp32 = leaf.mu.codes.dtype == jnp.float32
        in_fp64 = leaf.param is not None and leaf.param.dtype == jnp.float64
        if in_fp64 and not in_fp32 and implementation == "triton":
            raise ValueError(
                "The Triton kernel steps parameters of up to 32 bits, and these are float64. Use "
                'implementation=None or "xla".'
            )
        # FP32 leaves are small: XLA fuses their steps, also with each other.
        if chosen == "xla" or in_fp32 or in_fp64 or leaf.grad.size == 0:
            stepped[i] = adam_reference(leaf, count, hyper, settings, ids[i], decayed[i])
        else:
            waiting.append(i)
    if waiting:
        numbers = numbers_of_step(
            count,
            hyper,
            nesterov=settings.nesterov,
            has_param=leaves[waiting[0]].param is not None,
            smallest_v=settings.storage.resolution_of_second(),
        )
        keys = _keys(settings.storage.seed, count, ids, leaves)
        eps_root = not (isinstance(hyper.eps_root, int | float) and hyper.eps_root == 0)
        may_skip = hyper.skip is not False
        first = settings.storage.rounding_of_first(hyper.b1)
        for bucket in _buckets(waiting, leaves):
            table = jnp.array([(i, decayed[i]) for i in bucket], jnp.int32)
            results = _step_bucket(
                [leaves[i] for i in bucket],
                table,
                numbers,
                keys,
                settings=settings,
                first=first,
                eps_root=eps_root,
                may_skip=may_skip,
            )
            stepped.update(zip(bucket, results, strict=True))
    return [stepped[i] for i in range(len(leaves))]


def _keys(
    seed: int, count: Int[Array, ""], ids: Sequence[int], leaves: Sequence[Leaf]
) -> UInt32[Array, leaves]:
    """The keys of all leaves, those of shards inside a `shard_map` told apart."""
    arrays = [jax.tree.leaves(leaf) for leaf in leaves]
    if not any(noise.varying_axes(*a) for a in arrays):
        return noise.leaf_keys(seed, count, ids)
    return jnp.stack(
        [
            noise.distinguish(noise.leaf_key(seed, count, leaf), *a)
            for leaf, a in zip(ids, arrays, strict=True)
        ]
    )


def _buckets(indices: Sequence[int], leaves: Sequence[Leaf]) -> list[list[int]]:
    """Puts small leaves of the same dtypes together, BUCKET at a time; any other stands alone."""
    alike: dict[tuple, list[int]] = {}
    alone = []
    for i in indices:
        leaf = leaves[i]
        if leaf.grad.size >= SMALL:
            alone.append([i])
        else:
            dtypes = (leaf.grad.dtype, None if leaf.param is None else leaf.param.dtype)
            alike.setdefault(dtypes, []).append(i)
    buckets = []
    for together in alike.values():
        full = len(together) // BUCKET * BUCKET
        buckets += [together[k : k + BUCKET] for k in range(0, full, BUCKET)]
        alone += [[i] for i in together[full:]]
    return alone + buckets


# Under jit a launch is traced once for all buckets of the same shapes; XLA inlines it.
@functools.partial(jax.jit, static_argnames=("settings", "first", "eps_root", "may_skip"))
def _step_bucket(
    leaves: Sequence[Leaf],
    table: Int32[Array, "leaves 2"],
    numbers: Float[Array, 15],
    keys: UInt32[Array, ...],
    *,
    settings: Settings,
    first: Rounding,
    eps_root: bool,
    may_skip: bool,
) -> list[Stepped]:
    """Steps one leaf, or BUCKET of them, in one launch; `table` has (index, decayed) of each."""
    storage = settings.storage
    has_param = leaves[0].param is not None
    # Without parameters the kernel does not look at the first pointer.
    arrays = [
        [leaf.grad if leaf.param is None else leaf.param, leaf.grad, *leaf.mu, *leaf.nu]
        for leaf in leaves
    ]
    inputs_per_leaf, results_per_leaf = 8, 7

    def on_shards(
        shared: Sequence[Array], local: Sequence[Sequence[Array]], places: Sequence[LeafPlace]
    ) -> list[list[Array]]:
        numbers, keys, table = shared
        layout, programs = _layout(places, table, storage.group_size)
        aliases = {}
        for i in range(len(local)):
            first_in, first_out = 3 + inputs_per_leaf * i, results_per_leaf * i
            if has_param:
                aliases[first_in] = first_out
            aliases |= {first_in + 2 + k: first_out + 1 + k for k in range(6)}
        results = launch(
            step_leaf if len(local) == 1 else step_bucket,
            numbers,
            keys,
            layout,
            *(a for leaf in local for a in leaf),
            outputs=[
                jax.ShapeDtypeStruct(a.shape, a.dtype)
                for result, _, *moments in local
                for a in (result, *moments)
            ],
            aliases=aliases,
            programs=programs,
            warps=WARPS,
            GROUP=storage.group_size,
            GROUPS_PER_BLOCK=BLOCK // storage.group_size,
            WHOLE=all(
                place.shape and place.shape[-1] % storage.group_size == 0 for place in places
            ),
            FULL=all(math.prod(place.shape) % BLOCK == 0 for place in places),
            JUMPS=max(len(place.jumps) for place in places),
            HAS_PARAM=has_param,
            NESTEROV=settings.nesterov,
            EPS_ROOT=eps_root,
            ROUND_PARAM=settings.round_params and arrays[0][0].dtype == jnp.bfloat16,
            MAY_SKIP=may_skip,
            MU=_format_constants(storage.first, first, storage),
            NU=_format_constants(storage.second, storage.rounding_of_second(), storage),
            FAST=not dispatch.interpreting(),
        )
        return [results[k : k + results_per_leaf] for k in range(0, len(results), results_per_leaf)]

    stepped = over_mesh(on_shards, [numbers, keys, table], arrays, group_size=storage.group_size)
    return [Stepped(r[0], Expanded(*r[1:4]), Expanded(*r[4:7])) for r in stepped]


def _layout(
    places: Sequence[LeafPlace], table: Int32[Array, "leaves 2"], group_size: int
) -> tuple[Int32[Array, ...], int]:
    """One row of LAYOUT_FIELDS numbers per leaf for the kernel, and how many blocks there are."""
    rows: list[Any] = []
    blocks = 0
    for leaf, place in enumerate(places):
        shape = place.shape or (1,)
        groups_per_row = -(-shape[-1] // group_size)
        groups = math.prod(shape[:-1]) * groups_per_row
        if len(place.jumps) > MAX_JUMPS:
            raise ValueError(
                f"A leaf of shape {place.shape} on each device is sharded along more than "
                f"{MAX_JUMPS + 1} axes."
            )
        jumps = [*place.jumps, *[(1, 0)] * (MAX_JUMPS - len(place.jumps))]
        rows += [blocks, groups, groups_per_row, shape[-1], *table[leaf], place.start]
        rows += [number for jump in jumps for number in jump]
        blocks += -(-groups * group_size // BLOCK)
    # From scalars, which XLA folds: custom_partitioning takes no array constants.
    return jnp.stack([jax.lax.convert_element_type(n, jnp.int32) for n in rows]), blocks


def _format_constants(
    dtype: DTypeLike, rounding: Rounding, storage: Storage
) -> tuple[float | int, ...]:
    """What the kernel needs of a moment's format and its rounding."""
    # Stochastic rounding adds noise to codes in units of the last place, whose noise has 16 bits;
    # dithering to codes themselves, where it is as wide as the smallest.
    noise_unit = 1.0
    of_format: tuple[float | int, ...]
    if dtype in (DIRECTION, LOGARITHM):
        of_format, fit = (0.0, 0.0, 0.0, 0, 0), logarithms.FIT
    else:
        fmt, fit = format_of(dtype), fit_of(dtype, rounding)
        of_format = math.log2(fmt.max), fmt.tiny, fmt.max, fmt.min_exponent, fmt.mantissa_bits
        if rounding != "stochastic":
            noise_unit = fmt.tiny
    return (
        *of_format,  # 0 - 4: of FP8
        fit.log2_range,  # 5 - 7: how k is chosen
        float(fit.min_steps),
        fit.tolerance,
        ROUNDINGS.index(rounding),  # 8
        int(np.float32(128 * noise_unit).view(np.uint32)),  # 9: the bits that noise is put under
        int(dtype in (DIRECTION, LOGARITHM)),  # 10: whether codes are integers
        storage.resolution_of_second(),  # 11
    )


# --- Entry points of the kernel: Triton takes every array as a parameter of its own -----------


@kernel
def step_leaf(
    numbers, keys, layout,
    p, g, mc, ma, mk, nc, na, nk,
    r, mco, mao, mko, nco, nao, nko,
    GROUP: tl.constexpr, GROUPS_PER_BLOCK: tl.constexpr, WHOLE: tl.constexpr, FULL: tl.constexpr,
    JUMPS: tl.constexpr,
    HAS_PARAM: tl.constexpr, NESTEROV: tl.constexpr, EPS_ROOT: tl.constexpr,
    ROUND_PARAM: tl.constexpr, MAY_SKIP: tl.constexpr,
    MU: tl.constexpr, NU: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Steps one leaf."""
    step_block(
        tl.program_id(0), numbers, keys, layout,
        p, g, mc, ma, mk, nc, na, nk, r, mco, mao, mko, nco, nao, nko,
        GROUP, GROUPS_PER_BLOCK, WHOLE, FULL, JUMPS, HAS_PARAM, NESTEROV, EPS_ROOT, ROUND_PARAM,
        MAY_SKIP, MU, NU, FAST,
    )  # fmt: skip


@kernel
def step_bucket(
    numbers, keys, layout,
    p0, g0, mc0, ma0, mk0, nc0, na0, nk0,
    p1, g1, mc1, ma1, mk1, nc1, na1, nk1,
    p2, g2, mc2, ma2, mk2, nc2, na2, nk2,
    p3, g3, mc3, ma3, mk3, nc3, na3, nk3,
    p4, g4, mc4, ma4, mk4, nc4, na4, nk4,
    p5, g5, mc5, ma5, mk5, nc5, na5, nk5,
    p6, g6, mc6, ma6, mk6, nc6, na6, nk6,
    p7, g7, mc7, ma7, mk7, nc7, na7, nk7,
    r0, mco0, mao0, mko0, nco0, nao0, nko0,
    r1, mco1, mao1, mko1, nco1, nao1, nko1,
    r2, mco2, mao2, mko2, nco2, nao2, nko2,
    r3, mco3, mao3, mko3, nco3, nao3, nko3,
    r4, mco4, mao4, mko4, nco4, nao4, nko4,
    r5, mco5, mao5, mko5, nco5, nao5, nko5,
    r6, mco6, mao6, mko6, nco6, nao6, nko6,
    r7, mco7, mao7, mko7, nco7, nao7, nko7,
    GROUP: tl.constexpr, GROUPS_PER_BLOCK: tl.constexpr, WHOLE: tl.constexpr, FULL: tl.constexpr,
    JUMPS: tl.constexpr,
    HAS_PARAM: tl.constexpr, NESTEROV: tl.constexpr, EPS_ROOT: tl.constexpr,
    ROUND_PARAM: tl.constexpr, MAY_SKIP: tl.constexpr,
    MU: tl.constexpr, NU: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Steps eight leaves: each program looks up which one its block belongs to."""
    block = tl.program_id(0)
    row = layout
    p, g, mc, ma, mk, nc, na, nk = p0, g0, mc0, ma0, mk0, nc0, na0, nk0
    r, mco, mao, mko, nco, nao, nko = r0, mco0, mao0, mko0, nco0, nao0, nko0
    inputs = (
        (p1, g1, mc1, ma1, mk1, nc1, na1, nk1),
        (p2, g2, mc2, ma2, mk2, nc2, na2, nk2),
        (p3, g3, mc3, ma3, mk3, nc3, na3, nk3),
        (p4, g4, mc4, ma4, mk4, nc4, na4, nk4),
        (p5, g5, mc5, ma5, mk5, nc5, na5, nk5),
        (p6, g6, mc6, ma6, mk6, nc6, na6, nk6),
        (p7, g7, mc7, ma7, mk7, nc7, na7, nk7),
    )
    outputs = (
        (r1, mco1, mao1, mko1, nco1, nao1, nko1),
        (r2, mco2, mao2, mko2, nco2, nao2, nko2),
        (r3, mco3, mao3, mko3, nco3, nao3, nko3),
        (r4, mco4, mao4, mko4, nco4, nao4, nko4),
        (r5, mco5, mao5, mko5, nco5, nao5, nko5),
        (r6, mco6, mao6, mko6, nco6, nao6, nko6),
        (r7, mco7, mao7, mko7, nco7, nao7, nko7),
    )
    for leaf in tl.static_range(7):
        if block >= tl.load(layout + 13 * (leaf + 1)):
            row = layout + 13 * (leaf + 1)
            p, g, mc, ma, mk, nc, na, nk = inputs[leaf]
            r, mco, mao, mko, nco, nao, nko = outputs[leaf]
    step_block(
        block, numbers, keys, row,
        p, g, mc, ma, mk, nc, na, nk, r, mco, mao, mko, nco, nao, nko,
        GROUP, GROUPS_PER_BLOCK, WHOLE, FULL, JUMPS, HAS_PARAM, NESTEROV, EPS_ROOT, ROUND_PARAM,
        MAY_SKIP, MU, NU, FAST,
    )  # fmt: skip

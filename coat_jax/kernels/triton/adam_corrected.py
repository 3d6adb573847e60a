"""The launches of `coat_jax.kernels.triton.adam` for BF16 parameters with corrections.

Each leaf has one more array, its corrections `c`. These are kernels of their own because Triton
takes every array as a parameter: a step without corrections is compiled as if there were none.

All results are written where the arrays were read: launches alias the outputs to these arrays, so
the outputs' own pointers, which come last, are not used. This saves 16 registers.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.adam import step_block


@triton.jit
def step_corrected_leaf(
    numbers, keys, layout,
    p, g, mc, ma, mk, nc, na, nk, c,
    r, mco, mao, mko, nco, nao, nko, co,
    STEP: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Steps a leaf that has a launch of its own."""
    step_block(
        tl.program_id(0), numbers, keys, layout,
        p, g, mc, ma, mk, nc, na, nk, c, p, mc, ma, mk, nc, na, nk,
        True, STEP, LEAVES,
    )  # fmt: skip


@triton.jit
def step_corrected_bucket(
    numbers, keys, layout,
    p0, g0, mc0, ma0, mk0, nc0, na0, nk0, c0,
    p1, g1, mc1, ma1, mk1, nc1, na1, nk1, c1,
    p2, g2, mc2, ma2, mk2, nc2, na2, nk2, c2,
    p3, g3, mc3, ma3, mk3, nc3, na3, nk3, c3,
    p4, g4, mc4, ma4, mk4, nc4, na4, nk4, c4,
    p5, g5, mc5, ma5, mk5, nc5, na5, nk5, c5,
    p6, g6, mc6, ma6, mk6, nc6, na6, nk6, c6,
    p7, g7, mc7, ma7, mk7, nc7, na7, nk7, c7,
    r0, mco0, mao0, mko0, nco0, nao0, nko0, co0,
    r1, mco1, mao1, mko1, nco1, nao1, nko1, co1,
    r2, mco2, mao2, mko2, nco2, nao2, nko2, co2,
    r3, mco3, mao3, mko3, nco3, nao3, nko3, co3,
    r4, mco4, mao4, mko4, nco4, nao4, nko4, co4,
    r5, mco5, mao5, mko5, nco5, nao5, nko5, co5,
    r6, mco6, mao6, mko6, nco6, nao6, nko6, co6,
    r7, mco7, mao7, mko7, nco7, nao7, nko7, co7,
    STEP: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Steps eight leaves: each program looks up which one its block belongs to."""
    block = tl.program_id(0)
    row = layout
    p, g, mc, ma, mk, nc, na, nk, c = p0, g0, mc0, ma0, mk0, nc0, na0, nk0, c0
    inputs = (
        (p1, g1, mc1, ma1, mk1, nc1, na1, nk1, c1),
        (p2, g2, mc2, ma2, mk2, nc2, na2, nk2, c2),
        (p3, g3, mc3, ma3, mk3, nc3, na3, nk3, c3),
        (p4, g4, mc4, ma4, mk4, nc4, na4, nk4, c4),
        (p5, g5, mc5, ma5, mk5, nc5, na5, nk5, c5),
        (p6, g6, mc6, ma6, mk6, nc6, na6, nk6, c6),
        (p7, g7, mc7, ma7, mk7, nc7, na7, nk7, c7),
    )
    for leaf in tl.static_range(7):
        if block >= tl.load(layout + LEAVES.field.width * (leaf + 1)):
            row = layout + LEAVES.field.width * (leaf + 1)
            p, g, mc, ma, mk, nc, na, nk, c = inputs[leaf]
    step_block(
        block, numbers, keys, row,
        p, g, mc, ma, mk, nc, na, nk, c, p, mc, ma, mk, nc, na, nk,
        True, STEP, LEAVES,
    )  # fmt: skip

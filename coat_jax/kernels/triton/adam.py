"""One step of AdamW, in place: decode, update, encode. `coat_jax.kernels.adam` has the equations.

A program steps one block of one leaf. STEP is an `adam_launch.StepConstants`.

    numbers    `adam.StepNumbers`
    keys       one `noise.leaf_key` per leaf
    layout     a row of numbers per leaf; LEAVES is a `leaf_layout.Leaves`

Triton takes every array as a parameter of its own, hence the long signatures.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import clip, reciprocal, sqrt
from coat_jax.kernels.triton.leaf_layout import number_in_leaf, place_block
from coat_jax.kernels.triton.moments import encode_first, encode_second, load_codes, read_moments
from coat_jax.kernels.triton.noise import noise_bits
from coat_jax.kernels.triton.params import load_param, store_param


@triton.jit
def step_block(
    block, numbers, keys, layout,
    param, grad, mu_codes, mu_amax, mu_x16, nu_codes, nu_amax, nu_x16, correction,
    result, mu_codes_out, mu_amax_out, mu_x16_out, nu_codes_out, nu_amax_out, nu_x16_out,
    CORRECTED: tl.constexpr, STEP: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Steps one block of one leaf; where CORRECTED, its corrections too, in place."""
    MU: tl.constexpr = STEP.mu
    NU: tl.constexpr = STEP.nu
    NUMBER: tl.constexpr = STEP.number
    group, group_mask, start, offsets, mask = place_block(block, layout, LEAVES)

    # Decode and update. Factors common to a group or to the step are multiplied first.
    raw_grad = tl.load(grad + start + offsets, mask=mask, other=0.0).to(tl.float32)
    mu = load_codes(mu_codes + start + offsets, mask, MU)
    nu = load_codes(nu_codes + start + offsets, mask, NU)
    if STEP.has_param:
        p = load_param(param, correction, start, offsets, mask, CORRECTED)
    mu_amax = tl.load(mu_amax + group, mask=group_mask, other=0.0)
    nu_amax = tl.load(nu_amax + group, mask=group_mask, other=0.0)
    mu_x16 = tl.load(mu_x16 + group, mask=group_mask, other=16)
    nu_x16 = tl.load(nu_x16 + group, mask=group_mask, other=16)
    g = clip(raw_grad, tl.load(numbers + NUMBER.largest_gradient))
    m, v = read_moments(
        mu, mu_amax, mu_x16, nu, nu_amax, nu_x16,
        tl.load(numbers + NUMBER.log2_b1), tl.load(numbers + NUMBER.log2_b2), MU, NU,
    )  # fmt: skip
    m += tl.load(numbers + NUMBER.grad_to_m) * g
    new_root_v = tl.load(numbers + NUMBER.grad_to_root_v) * g
    v += new_root_v * new_root_v

    if STEP.may_skip:  # The step is in place: what is not stored stays.
        skipped = tl.load(numbers + NUMBER.skip) != 0.0
        group_mask = tl.where(skipped, False, group_mask)
        mask = tl.where(skipped, False, mask)

    # The step: the direction, multiplied by the learning rate where there is a parameter.
    smallest = nu_amax * tl.load(numbers + NUMBER.smallest_v)
    denominator = tl.maximum(v, smallest[:, None], propagate_nan=tl.PropagateNan.ALL)
    if STEP.eps_root:
        denominator += tl.load(numbers + NUMBER.eps_root)
    denominator = sqrt(denominator) * tl.load(numbers + NUMBER.rsqrt_debias2)
    denominator += tl.load(numbers + NUMBER.eps)
    step = m * tl.load(numbers + NUMBER.m_to_step)
    if STEP.nesterov:
        step += g * tl.load(numbers + NUMBER.grad_to_step)
    step = clip(step * reciprocal(denominator), tl.load(numbers + NUMBER.largest_step))
    step += raw_grad * 0.0  # NaN for an infinite gradient, as exact moments would give
    key = tl.load(keys + tl.load(layout + LEAVES.field.leaf))
    global_group = number_in_leaf(group, layout, LEAVES)
    if STEP.has_param:
        decay = tl.load(numbers + NUMBER.decay)
        decay *= tl.load(layout + LEAVES.field.decayed).to(tl.float32)
        step += p * (1.0 - decay)  # now the new parameter
        store_param(
            step, result, correction, start, offsets, mask, key, global_group,
            CORRECTED, STEP.round_param, LEAVES.group,
        )  # fmt: skip
    else:
        tl.store(result + start + offsets, step.to(result.dtype.element_ty), mask=mask)

    # Encode. Both moments of an element take their noise from one hash, but from different bits.
    if MU.rounding != "nearest" or NU.rounding != "nearest":
        noise_v, noise_m = noise_bits(key, global_group, NU.noise_base, MU.noise_base, LEAVES.group)
    else:
        noise_v, noise_m = v, m  # not used
    codes, amax, x16 = encode_second(v, noise_v, NU)
    tl.store(nu_codes_out + start + offsets, codes.to(nu_codes_out.dtype.element_ty), mask=mask)
    tl.store(nu_amax_out + group, amax, mask=group_mask)
    tl.store(nu_x16_out + group, x16.to(tl.uint8), mask=group_mask)
    codes, amax, x16 = encode_first(
        m, noise_m, v, amax, tl.load(numbers + NUMBER.stochastic_below), MU, NU
    )
    tl.store(mu_codes_out + start + offsets, codes.to(mu_codes_out.dtype.element_ty), mask=mask)
    tl.store(mu_amax_out + group, amax, mask=group_mask)
    tl.store(mu_x16_out + group, x16.to(tl.uint8), mask=group_mask)


@triton.jit
def step_leaf(
    numbers, keys, layout,
    p, g, mc, ma, mk, nc, na, nk,
    r, mco, mao, mko, nco, nao, nko,
    STEP: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Steps a leaf that has a launch of its own."""
    step_block(
        tl.program_id(0), numbers, keys, layout,
        p, g, mc, ma, mk, nc, na, nk, None, r, mco, mao, mko, nco, nao, nko,
        False, STEP, LEAVES,
    )  # fmt: skip


@triton.jit
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
    STEP: tl.constexpr, LEAVES: tl.constexpr,
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
        if block >= tl.load(layout + LEAVES.field.width * (leaf + 1)):
            row = layout + LEAVES.field.width * (leaf + 1)
            p, g, mc, ma, mk, nc, na, nk = inputs[leaf]
            r, mco, mao, mko, nco, nao, nko = outputs[leaf]
    step_block(
        block, numbers, keys, row,
        p, g, mc, ma, mk, nc, na, nk, None, r, mco, mao, mko, nco, nao, nko,
        False, STEP, LEAVES,
    )  # fmt: skip


# BF16 parameters with corrections have kernels of their own: a step without corrections is compiled
# as if there were none. All results are written where the arrays were read: launches alias the
# outputs to these arrays, so the outputs' own pointers are not used. This saves 16 registers.


@triton.jit
def step_corrected_leaf(
    numbers, keys, layout,
    p, g, mc, ma, mk, nc, na, nk, c,
    r, mco, mao, mko, nco, nao, nko, co,
    STEP: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """The same for a BF16 leaf with corrections `c`."""
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
    """The same for eight of these."""
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


# (with corrections, a leaf alone) -> entry point
STEPS = {
    (False, True): step_leaf,
    (False, False): step_bucket,
    (True, True): step_corrected_leaf,
    (True, False): step_corrected_bucket,
}

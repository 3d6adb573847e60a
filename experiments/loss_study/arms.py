"""The arms of `loss_study`, and the sizes of model that they are measured at.

A new arm is one line: a `replace` of another one.
"""

from dataclasses import replace

import coat_jax as coat
from coat_jax import models
from coat_jax.storage import PAPER, Storage
from experiments.loss_study import operands, sums
from experiments.loss_study.arm import Arm, Settings, Size
from experiments.loss_study.moments import Expanded, Logarithm, Separately
from experiments.loss_study.muon import Muon

BASE = Arm(baseline=True)
NEVER = 1 << 60  # a `min_size` that leaves every leaf in FP32
COAT_FP32 = Arm(precision=coat.COAT)
E4M3_GRADIENTS = replace(coat.COAT, backward=coat.E4M3)
WITHOUT_PRODUCTS = replace(coat.COAT, fp8_linear=False)
MOMENTS = Arm(moments=Storage())
EXPANDED = Storage(first=coat.E4M3, second=coat.E4M3)
BOTH = Arm(precision=coat.COAT, moments=Storage())
MUON = Arm(moments=Muon(), baseline=True)


def to_nearest(arm: Arm) -> Arm:
    """The arm with saved values that are rounded to nearest."""

    def changed(precision: coat.Precision) -> coat.Precision:
        saves = precision.block is not None or precision.attention_block is not None
        return replace(precision, stochastic=False) if saves else precision

    start = None if arm.start is None else changed(arm.start)
    return replace(arm, precision=changed(arm.precision), start=start)


ARMS: dict[str, Arm] = {
    # Baselines: these differ by rounding only.
    "bf16": BASE,
    "bf16_ulp": replace(BASE, perturbed=True),
    "bf16_microbatches": replace(BASE, microbatches=2),
    "bf16_fused": replace(BASE, moments=Storage(min_size=NEVER)),
    # As good as the baselines: they show how far apart runs end by chance.
    "bf16_shaken": replace(BASE, shaken=1, baseline=False),
    "bf16_shaken_again": replace(BASE, shaken=2, baseline=False),
    # COAT and other presets; their halves, moments and activations, alone; and single changes.
    "coat": BOTH,
    "coat_lean": replace(BOTH, precision=coat.COAT_LEAN),
    "coat_int8": replace(BOTH, precision=coat.COAT_INT8),
    "moments": MOMENTS,
    "activations": COAT_FP32,
    "coat_expanded": replace(BOTH, moments=EXPANDED),
    "activations_lean": replace(COAT_FP32, precision=coat.COAT_LEAN),
    "coat_stochastic_backward": replace(
        BOTH, precision=replace(coat.COAT, stochastic_backward=True)
    ),
    # The FP8 products of the backward pass are summed in FP32.
    "coat_accurate_gradients": replace(BOTH, accurate=tuple(sums.PRODUCTS)),
    # The paper's whole recipe: its activations and its moments.
    "paper": Arm(precision=coat.COAT_PAPER, moments=PAPER),
    # The forward pass continues with the rounded values, as in COAT_PAPER. These are the paper's
    # activations, with coat_jax's moments or FP32 ones.
    "coat_rounded_forward": replace(BOTH, precision=coat.COAT_PAPER),
    "activations_rounded_forward": replace(COAT_FP32, precision=coat.COAT_PAPER),
    "saved_rounded_forward": Arm(precision=replace(coat.COAT_PAPER, fp8_linear=False)),
    # When the cost arises: one precision for the first part of the run, another one after it.
    "coat_after_bf16": replace(BOTH, start=coat.BF16),
    "coat_after_short_bf16": replace(BOTH, start=coat.BF16, start_share=1 / 24),
    "coat_before_short_bf16": replace(MOMENTS, start=coat.COAT, start_share=23 / 24),
    "coat_lean_after_bf16": replace(BOTH, precision=coat.COAT_LEAN, start=coat.BF16),
    "coat_int8_after_bf16": replace(BOTH, precision=coat.COAT_INT8, start=coat.BF16),
    "activations_after_bf16": replace(COAT_FP32, start=coat.BF16),
    "activations_after_bf16_tenth": replace(COAT_FP32, start=coat.BF16, start_share=0.1),
    "activations_after_products": replace(COAT_FP32, start=coat.FP8_LINEAR),
    "activations_after_saved": replace(COAT_FP32, start=WITHOUT_PRODUCTS),
    "bf16_after_activations": Arm(start=coat.COAT),
    # As in fine-tuning, most has been learnt before FP8 begins.
    "coat_for_last_quarter": replace(BOTH, start=coat.BF16, start_share=0.75),
    # Parts of the activations: FP8 products alone, or some of the saved values in FP8 alone.
    "products": Arm(precision=coat.FP8_LINEAR),
    "products_e4m3_gradients": Arm(precision=replace(coat.FP8_LINEAR, backward=coat.E4M3)),
    "saved": Arm(precision=WITHOUT_PRODUCTS),
    "saved_attention": Arm(precision=replace(coat.BF16, attention_block=16)),
    "saved_64": Arm(precision=replace(WITHOUT_PRODUCTS, block=64)),
    # Single operands of products, rounded to nearest; see `operands`.
    **{f"{name}_rounded": Arm(rounded=(name,)) for name in operands.NAMES},
    "forward_rounded": Arm(rounded=("inputs", "weights")),
    "operands_rounded": Arm(rounded=operands.NAMES),
    # All that COAT rounds, but with products in BF16, which are summed in FP32.
    "coat_exact_sums": Arm(precision=WITHOUT_PRODUCTS, moments=Storage(), rounded=operands.NAMES),
    # Gradients in E4M3, with moments in FP32 or in 8 bits.
    "activations_e4m3_gradients": replace(COAT_FP32, precision=E4M3_GRADIENTS),
    "coat_e4m3_gradients": replace(BOTH, precision=E4M3_GRADIENTS),
    # Parts of the moments.
    "first": Arm(moments=Separately(first=Expanded())),
    "second": Arm(moments=Separately(second=Expanded(stochastic=True))),
    "second_logarithm": Arm(moments=Separately(second=Logarithm())),
    "second_nearest": Arm(moments=Separately(second=Expanded())),
    "first_stochastic": Arm(moments=Separately(first=Expanded(stochastic=True))),
    "both_separately": Arm(moments=Separately(Expanded(), Expanded(stochastic=True))),
    "moments_expanded": Arm(moments=EXPANDED),
    "moments_paper": Arm(moments=PAPER),
    "moments_nearest": Arm(moments=Storage(stochastic=False)),
    "moments_64": Arm(moments=Storage(group_size=64)),
    "moments_32": Arm(moments=Storage(group_size=32)),
    "moments_first_e5m2": Arm(moments=replace(EXPANDED, first=coat.E5M2)),
    # Parameters in BF16: rounded to nearest or stochastically, without or with 8-bit corrections.
    "params_bf16": Arm(params="bf16"),
    "params_bf16_stochastic": Arm(params="bf16_stochastic"),
    "params_24_bits": Arm(params="24_bits"),
    "params_24_bits_stochastic": Arm(params="24_bits_stochastic"),
    "moments_params_bf16_stochastic": replace(MOMENTS, params="bf16_stochastic"),
    "moments_params_24_bits": replace(MOMENTS, params="24_bits"),
    "moments_params_24_bits_stochastic": replace(MOMENTS, params="24_bits_stochastic"),
    # Settings of the optimizer: arms are compared with baselines of the same settings.
    "bf16_b2_999": replace(BASE, optimizer={"b2": 0.999}),
    "bf16_b2_999_ulp": replace(BASE, optimizer={"b2": 0.999}, perturbed=True),
    "moments_b2_999": replace(MOMENTS, optimizer={"b2": 0.999}),
    # Muon: its arms are compared with its own baselines, optax's in FP32.
    "muon": MUON,
    "muon_ulp": replace(MUON, perturbed=True),
    "muon_bf16_products": Arm(moments=Muon(Storage(min_size=NEVER))),
    "fp8_muon": Arm(moments=Muon(Storage())),
    "fp8_muon_expanded": Arm(moments=Muon(EXPANDED)),
    "fp8_muon_32": Arm(moments=Muon(Storage(group_size=32))),
    "fp8_muon_coat": Arm(precision=coat.COAT, moments=Muon(Storage())),
    # At size 40M only the embedding, which AdamW updates, is large enough for 8-bit states.
    "fp8_muon_embedding": Arm(moments=Muon(Storage(min_size=1 << 20))),
    # COAT's products and saved activations alone, where runs differ little by chance.
    "muon_coat": Arm(precision=coat.COAT, moments=Muon()),
    "muon_coat_int8": Arm(precision=coat.COAT_INT8, moments=Muon()),
    "muon_coat_lean": Arm(precision=coat.COAT_LEAN, moments=Muon()),
    "muon_coat_paper": Arm(precision=coat.COAT_PAPER, moments=Muon()),
    "muon_products": Arm(precision=coat.FP8_LINEAR, moments=Muon()),
}
# What is saved is rounded to nearest, not stochastically.
ARMS |= {
    f"{name}_nearest": to_nearest(ARMS[name])
    for name in (
        *("coat", "coat_lean", "coat_e4m3_gradients", "saved", "saved_64"),
        *("activations", "activations_lean", "activations_e4m3_gradients"),
        *("coat_after_bf16", "coat_lean_after_bf16", "bf16_after_activations"),
        *("activations_after_bf16", "activations_after_bf16_tenth"),
        *("activations_after_products", "activations_after_saved"),
    )
}

SIZES: dict[str, Size] = {
    "tiny": Size(
        models.Config(
            vocab=256, width=128, layers=2, heads=4, kv_heads=4, head_dim=32, ffn=384,
            context=64, tied=True, scan=False,
        ),
        Settings(20, 8, 64, 1, 3e-3, held_out=32),
        tokens_per_second=1e6,
    ),
    "40M": Size(
        models.Config(
            vocab=16384, width=512, layers=10, heads=8, kv_heads=8, head_dim=64, ffn=1408,
            context=1024, tied=True, scan=False,
        ),
        # At 1.5e-3, runs that differ by rounding only end 0.54 % apart, 20 times as far.
        Settings(400, 64, 1024, 1, 5e-4, held_out=1024),
        tokens_per_second=0.9e6,
    ),
    "124M": Size(
        models.Config(
            vocab=50304, width=768, layers=12, heads=12, kv_heads=12, head_dim=64, ffn=2048,
            context=1024, tied=True, scan=False,
        ),
        Settings(600, 64, 1024, 2, 6e-4, held_out=1024),
        tokens_per_second=4.2e5,
    ),
    "350M": Size(
        models.Config(
            vocab=50304, width=1024, layers=24, heads=16, kv_heads=16, head_dim=64, ffn=2816,
            context=1024, tied=True, scan=False,
        ),
        Settings(300, 64, 1024, 4, 3e-4, held_out=512),
        tokens_per_second=1.6e5,
    ),
}  # fmt: skip

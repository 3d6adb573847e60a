"""The arms of the loss study, and the sizes of model that they are measured at.

A new arm is one line: a `replace` of another one.
"""

from dataclasses import replace

import coat_jax as coat
from coat_jax import models
from coat_jax.storage import PAPER, Storage
from experiments.loss_study import operands, saved
from experiments.loss_study.arm import Arm, Settings, Size
from experiments.loss_study.muon import Muon
from experiments.loss_study.saved import Saved

BASE = Arm(baseline=True)
MOMENTS = Arm(moments=Storage())
BOTH = Arm(precision=coat.COAT, moments=Storage())
SAVED = replace(coat.COAT, fp8_linear=False)
MUON = Arm(moments=Muon(), baseline=True)
FEW_BITS = {
    "e3m2": Saved(format="E3M2"),
    "e2m1": Saved(),
    "e2m1_of_32": Saved(block=32),
    "nvfp4": Saved(scale="E4M3"),
}
# By itself each array, those that COAT saves in FP8, and those of COAT_LEAN.
SAVED_ARRAYS: dict[str, tuple[saved.Name, ...]] = {
    **{name: (name,) for name in saved.NAMES},
    "norms_and_hidden": ("norms", "hidden"),
    "all": saved.NAMES,
}

ARMS: dict[str, Arm] = {
    # Baselines: these differ by rounding only.
    "bf16": BASE,
    "bf16_ulp": replace(BASE, perturbed=True),
    "bf16_microbatches": replace(BASE, microbatches=2),
    # Presets, with 8-bit moments.
    "coat": BOTH,
    "coat_lean": replace(BOTH, precision=coat.COAT_LEAN),
    "coat_int8": replace(BOTH, precision=coat.COAT_INT8),
    "coat_bf16_forward": replace(BOTH, precision=coat.COAT_BF16_FORWARD),
    # The paper's activations, with coat_jax's moments and with its own.
    "coat_rounded_forward": replace(BOTH, precision=coat.COAT_PAPER),
    "paper": Arm(precision=coat.COAT_PAPER, moments=PAPER),
    # Parts of COAT alone.
    "moments": MOMENTS,
    "products": Arm(precision=coat.FP8_LINEAR),
    "saved": Arm(precision=SAVED),
    "saved_nearest": Arm(precision=replace(SAVED, stochastic=False)),
    # Single operands of products, rounded to nearest; see `operands`.
    **{f"{name}_rounded": Arm(rounded=(name,)) for name in operands.NAMES},
    # One precision for the first part of the run, another one after it.
    "coat_after_bf16": replace(BOTH, start=coat.BF16),
    "coat_after_short_bf16": replace(BOTH, start=coat.BF16, start_share=1 / 24),
    # Other moments, and parameters in BF16.
    "moments_paper": Arm(moments=PAPER),
    "params_bf16_stochastic": Arm(params="bf16_stochastic"),
    "params_24_bits_stochastic": Arm(params="24_bits_stochastic"),
    # Muon: its arms are compared with its own baselines, optax's in FP32.
    "muon": MUON,
    "muon_ulp": replace(MUON, perturbed=True),
    "fp8_muon": Arm(moments=Muon(Storage())),
    "fp8_muon_coat_int8": Arm(precision=coat.COAT_INT8, moments=Muon(Storage())),
    "muon_coat": Arm(precision=coat.COAT, moments=Muon()),
    "muon_coat_int8": Arm(precision=coat.COAT_INT8, moments=Muon()),
    "muon_coat_bf16_forward": Arm(precision=coat.COAT_BF16_FORWARD, moments=Muon()),
    "muon_coat_lean": Arm(precision=coat.COAT_LEAN, moments=Muon()),
    "muon_coat_lean_int8": Arm(
        precision=replace(coat.COAT_LEAN, forward_products="int8"), moments=Muon()
    ),
    "muon_coat_lean_bf16_forward": Arm(
        precision=replace(coat.COAT_LEAN, forward_products="bf16"), moments=Muon()
    ),
    "muon_saved": Arm(precision=SAVED, moments=Muon()),
    # Forward products in BF16 in the first quarter of the run, or in its last twentieth.
    "muon_coat_after_bf16_forward": Arm(
        precision=coat.COAT, start=coat.COAT_BF16_FORWARD, moments=Muon()
    ),
    "muon_coat_before_bf16_forward": Arm(
        precision=coat.COAT_BF16_FORWARD, start=coat.COAT, start_share=0.95, moments=Muon()
    ),
    # The products of some layers, and what is saved, in fewer bits than FP8's; see `saved`.
    **{
        f"muon_{product}_rounded": Arm(rounded=operands.NAMES, products=(product,), moments=Muon())
        for product in operands.ALL
    },
    **{
        f"muon_saved_{name}_{how}": Arm(saved=replace(FEW_BITS[how], arrays=arrays), moments=Muon())
        for name, arrays in SAVED_ARRAYS.items()
        for how in FEW_BITS
    },
    "muon_coat_paper": Arm(precision=coat.COAT_PAPER, moments=Muon()),
    "muon_products": Arm(precision=coat.FP8_LINEAR, moments=Muon()),
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
    # 40 million of 190 million parameters for each token.
    "experts": Size(
        models.Config(
            vocab=16384, width=512, layers=10, heads=8, kv_heads=8, head_dim=64, ffn=352,
            context=1024, tied=True, scan=False,
            experts=models.Experts(count=32, chosen=4, aux_loss=0.01, z_loss=1e-3),
        ),
        Settings(400, 64, 1024, 1, 5e-4, held_out=1024),
        tokens_per_second=0.4e6,
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

"""The arms of `stability`, and the sizes of model that they are tried at.

A new arm is one line: a `replace` of one field of another one.
"""

from dataclasses import replace

import coat_jax as coat
from coat_jax import models
from coat_jax.storage import PAPER, Storage
from experiments.stability.arm import Arm, Settings, Size

BASELINE = "bf16"


def products(forward: str, backward: str | None = None) -> Arm:
    """All operands of the layers' products in these formats."""
    return Arm(coat.Precision(forward=forward, backward=backward or forward, block=None))


COAT = Arm(coat.COAT, moments=Storage())
WITHOUT_PRODUCTS = replace(coat.COAT, fp8_linear=False)
# GPUs do not multiply E5M2 with E5M2; simulated, with another bias, it can be done.
E5M2, E4M3 = products("E5M2:bias=16"), products("E4M3:bias=8")

ARMS: dict[str, Arm] = {
    BASELINE: Arm(),
    # One mantissa bit less each time: E8M7 is BF16.
    "e8m7": products("E8M7"),
    "e8m6": products("E8M6"),
    "e8m5": products("E8M5"),
    "e8m4": products("E8M4"),
    "e8m3": products("E8M3"),
    # Fewer exponent bits, with a scale per tensor and without.
    "e5m2": E5M2,
    "e4m3": E4M3,
    "e5m2_unscaled": replace(E5M2, scaled=False),
    "e4m3_unscaled": replace(E4M3, scaled=False),
    # The head, which is in BF16 otherwise.
    "e8m3_head": replace(products("E8M3"), head=True),
    "e5m2_head": replace(E5M2, head=True),
    "e4m3_head": replace(E4M3, head=True),
    # Ours.
    "fp8_linear": Arm(coat.FP8_LINEAR),
    "coat": COAT,
    "coat_lean": replace(COAT, precision=coat.COAT_LEAN),
    # Parts of COAT: one change each, to BF16 or to COAT.
    "moments": Arm(moments=Storage()),
    "saved": Arm(WITHOUT_PRODUCTS),
    "activations": Arm(coat.COAT),
    "coat_rounded_forward": replace(COAT, precision=coat.COAT_PAPER),
    "coat_e4m3_gradients": replace(COAT, precision=replace(coat.COAT, backward=coat.E4M3)),
    "coat_paper_moments": replace(COAT, moments=PAPER),
    "fp8_linear_head": Arm(coat.FP8_LINEAR, head=True),
    # Without master weights.
    "params_bf16": Arm(params="bf16"),
    "params_bf16_stochastic": Arm(params="bf16_stochastic"),
    "coat_params_bf16": replace(COAT, params="bf16"),
    "coat_params_bf16_stochastic": replace(COAT, params="bf16_stochastic"),
}

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)

SIZES: dict[str, Size] = {
    "tiny": Size(
        models.Config(
            vocab=256, width=64, layers=2, heads=2, kv_heads=2, head_dim=32, ffn=192, context=32,
        ),
        Settings(100, 4, 32, every=2),
        RATES[:4],
        together=16,
    ),
    "0.5M": Size(
        models.Config(
            vocab=256, width=128, layers=2, heads=4, kv_heads=4, head_dim=32, ffn=384, context=64,
        ),
        Settings(200, 4, 64),
        RATES,
        together=64,
    ),
    "5M": Size(
        models.Config(
            vocab=256, width=256, layers=6, heads=4, kv_heads=4, head_dim=64, ffn=704, context=128,
        ),
        Settings(300, 8, 128),
        RATES,
        together=64,
    ),
    "12M": Size(
        models.Config(
            vocab=256, width=384, layers=7, heads=6, kv_heads=6, head_dim=64, ffn=1024, context=128,
        ),
        Settings(400, 16, 128),
        RATES,
        together=16,
    ),
    "30M": Size(
        models.Config(
            vocab=256, width=512, layers=10, heads=8, kv_heads=8, head_dim=64, ffn=1408,
            context=128,
        ),
        Settings(500, 16, 128),
        RATES,
        together=8,
    ),
}  # fmt: skip

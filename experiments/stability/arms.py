"""The arms of `stability`, and the sizes of model that they are tried at.

A new arm is one line: a `replace` of one field of another one.
"""

from dataclasses import replace

import coat_jax as coat
from coat_jax import models
from coat_jax.storage import Storage
from experiments.stability.arm import Arm, Settings, Size

BASELINE = "bf16"


def products(fmt: str) -> Arm:
    """All operands of the layers' products in this format."""
    return Arm(coat.Precision(forward=fmt, backward=fmt, block=None))


COAT = Arm(coat.COAT, moments=Storage())
WITHOUT_PRODUCTS = replace(coat.COAT, fp8_linear=False)
# GPUs do not multiply E5M2 with E5M2; simulated, with another bias, it can be done.
E5M2, E4M3 = products("E5M2:bias=16"), products("E4M3:bias=8")

ARMS: dict[str, Arm] = {
    BASELINE: Arm(),
    # One mantissa bit less each time: E8M7 is BF16.
    **{f"e8m{bits}": products(f"E8M{bits}") for bits in (7, 6, 5, 4, 3)},
    # Fewer exponent bits, with a scale per tensor and without.
    "e5m2": E5M2,
    "e4m3": E4M3,
    "e5m2_unscaled": replace(E5M2, scaled=False),
    "e4m3_unscaled": replace(E4M3, scaled=False),
    # Ours.
    "fp8_linear": Arm(coat.FP8_LINEAR),
    "coat": COAT,
    "coat_lean": replace(COAT, precision=coat.COAT_LEAN),
    # Parts of COAT: one change each, to BF16 or to COAT.
    "moments": Arm(moments=Storage()),
    "saved": Arm(WITHOUT_PRODUCTS),
    "coat_rounded_forward": replace(COAT, precision=coat.COAT_PAPER),
    # Without master weights.
    "params_bf16": Arm(params="bf16"),
    "params_bf16_stochastic": Arm(params="bf16_stochastic"),
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
}  # fmt: skip

"""FP8 training for JAX: optimizer states and saved activations in 8 bits.

import coat_jax as coat

tx = coat.optax.fp8_adamw(1e-3, b2=0.95, weight_decay=0.1)   # AdamW, 2.1 bytes a parameter
tx = coat.optax.compress(optax.lion(1e-4))                   # any optax transformation
model = coat.nn.convert(model, precision=coat.COAT)          # an NNX model, its layers in FP8
y = coat.ops.gated_mlp(x, norm, gate, up, down)              # a layer as a plain function
h = coat.save_fp8(h, "hidden")                               # saved in FP8 by jax.checkpoint
e = coat.expansion.encode(x)                                 # dynamic range expansion by itself
"""

import importlib
from typing import Any

from coat_jax import ops as ops
from coat_jax import optax as optax
from coat_jax import storage as storage
from coat_jax import telemetry as telemetry
from coat_jax.numerics import blocks as blocks
from coat_jax.numerics import expansion as expansion
from coat_jax.numerics import formats as formats
from coat_jax.numerics import integers as integers
from coat_jax.numerics import logarithms as logarithms
from coat_jax.numerics import minifloat as minifloat
from coat_jax.numerics import noise as noise
from coat_jax.numerics import quantizer as quantizer
from coat_jax.numerics import statistics as statistics
from coat_jax.numerics.expansion import Expanded as Expanded
from coat_jax.numerics.formats import E4M3 as E4M3
from coat_jax.numerics.formats import E5M2 as E5M2
from coat_jax.ops.saving import save_fp8 as save_fp8
from coat_jax.precision import BF16 as BF16
from coat_jax.precision import COAT as COAT
from coat_jax.precision import COAT_BF16_FORWARD as COAT_BF16_FORWARD
from coat_jax.precision import COAT_INT8 as COAT_INT8
from coat_jax.precision import COAT_LEAN as COAT_LEAN
from coat_jax.precision import COAT_PAPER as COAT_PAPER
from coat_jax.precision import FP8_LINEAR as FP8_LINEAR
from coat_jax.precision import Precision as Precision
from coat_jax.residuals import policies as policies
from coat_jax.residuals import saved_bytes as saved_bytes
from coat_jax.storage import Storage as Storage

__version__ = "0.1.0.dev0"

# Imported on first use, because importing Flax is slow.
_WITH_FLAX = ("evaluation", "generation", "linen", "models", "nn", "quantization", "training")


def __getattr__(name: str) -> Any:
    if name in _WITH_FLAX:
        return importlib.import_module(f"coat_jax.{name}")
    raise AttributeError(f"module 'coat_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WITH_FLAX})

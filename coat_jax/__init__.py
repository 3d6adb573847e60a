"""FP8 training for JAX: optimizer states and saved activations in 8 bits.

import coat_jax as coat

tx = coat.optax.fp8_adamw(1e-3, b2=0.95, weight_decay=0.1)   # AdamW, 2.1 bytes a parameter
tx = coat.optax.compress(optax.lion(1e-4))                   # any optax transformation
model = coat.nn.convert(model, precision=coat.COAT)          # an NNX model, its layers in FP8
y = coat.ops.gated_mlp(x, norm, gate, up, down)              # a layer as a plain function
e = coat.expansion.encode(x)                                 # dynamic range expansion by itself
"""

import importlib
from typing import Any

from coat_jax import ops, optax, storage, telemetry
from coat_jax.numerics import (
    blocks,
    expansion,
    formats,
    integers,
    logarithms,
    minifloat,
    noise,
    quantizer,
    statistics,
)
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.precision import BF16, COAT, COAT_INT8, COAT_LEAN, COAT_PAPER, FP8_LINEAR, Precision
from coat_jax.storage import Storage

__version__ = "0.1.0.dev0"

# Imported on first use, because importing Flax is slow.
_WITH_FLAX = ("evaluation", "generation", "linen", "models", "nn", "quantization", "training")


def __getattr__(name: str) -> Any:
    if name in _WITH_FLAX:
        return importlib.import_module(f"coat_jax.{name}")
    raise AttributeError(f"module 'coat_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WITH_FLAX})


__all__ = [
    "BF16",
    "COAT",
    "COAT_INT8",
    "COAT_LEAN",
    "COAT_PAPER",
    "E4M3",
    "E5M2",
    "FP8_LINEAR",
    "Expanded",
    "Precision",
    "Storage",
    "blocks",
    "evaluation",
    "expansion",
    "formats",
    "generation",
    "integers",
    "linen",
    "logarithms",
    "minifloat",
    "models",
    "nn",
    "noise",
    "ops",
    "optax",
    "quantization",
    "quantizer",
    "statistics",
    "storage",
    "telemetry",
    "training",
]

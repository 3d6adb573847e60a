"""FP8 training for JAX: optimizer states, and later saved activations, in 8 bits.

import coat_jax as coat

tx = coat.optax.fp8_adamw(1e-3, b2=0.95, weight_decay=0.1)   # AdamW, 2.1 bytes a parameter
tx = coat.optax.compress(optax.lion(1e-4))                   # any optax transformation
e = coat.expansion.encode(x)                                 # dynamic range expansion by itself
"""

from coat_jax import blocks, expansion, formats, moments, noise, ops, optax, qtensor
from coat_jax.expansion import Expanded
from coat_jax.formats import E4M3, E5M2
from coat_jax.moments import Storage
from coat_jax.precision import BF16, COAT, COAT_LEAN, FP8_LINEAR, Precision
from coat_jax.qtensor import QTensor

__version__ = "0.1.0.dev0"

__all__ = [
    "BF16",
    "COAT",
    "COAT_LEAN",
    "E4M3",
    "E5M2",
    "FP8_LINEAR",
    "Expanded",
    "Precision",
    "QTensor",
    "Storage",
    "blocks",
    "expansion",
    "formats",
    "moments",
    "noise",
    "ops",
    "optax",
    "qtensor",
]

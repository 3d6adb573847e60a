"""FP8 for Flax Linen: linear layers whose products are replaced.

    import flax.linen as nn

    dense = nn.Dense(4096, use_bias=False, dot_general_cls=coat.linen.dot_general_cls())

DenseGeneral takes the same argument; attention takes it as `qkv_dot_general_cls` and
`out_dot_general_cls`.
"""

import functools
from collections.abc import Callable

from coat_jax.ops import DotGeneral
from coat_jax.precision import COAT, Precision, precision_of


def dot_general_cls(precision: Precision | str = COAT) -> Callable[[], DotGeneral]:
    """Returns the `dot_general_cls` argument of Linen's Dense and DenseGeneral.

    Args:
        precision: a `coat.Precision`, or its name.
    """
    return functools.partial(DotGeneral, precision_of(precision))

"""What the trainer asks of a model, whatever it computes.

    model = Module(config, rngs=rngs)                  an nnx.Module; config is a ModelConfig
    loss = model.loss(batch)                           a Loss: sum, count, statistics
    loss = model.loss(batch, evaluate=True)            without penalties such as a z-loss

A batch is a tree of arrays whose first axis is over rows. Randomness, such as noise, comes from
seeds in the batch, so that a batch is a function of the config and its number.

`nnx.Param`s have gradients and moments. Variables of other types are state without gradients,
which a method `after_step(statistics)` may update; it may return numbers for the log, by name. A
method `stages(batch)` divides the model for a backward pass that frees gradients as it goes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from coat_jax.errors import UserError
from coat_jax.nn import MeshAxes
from coat_jax.precision import COAT, Precision, precision_of
from coat_jax.validation import brief, require_fields


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss, which is a mean over labels, in parts that add up over microbatches and devices.

    Attributes:
        sum: of the losses of all labels.
        count: how many labels there are.
        statistics: other sums over the labels, by name. The log has the means of numbers.
    """

    sum: Float[Array, ""]
    count: Num[Array, ""]
    statistics: Mapping[str, Array] = dataclasses.field(default_factory=dict)

    @property
    def mean(self) -> Float[Array, ""]:
        """The loss; 0 without labels."""
        return self.sum / jnp.maximum(self.count, 1).astype(self.sum.dtype)

    @property
    def scalars(self) -> dict[str, Array]:
        """The statistics that are numbers."""
        return {name: total for name, total in self.statistics.items() if jnp.ndim(total) == 0}


class Work(NamedTuple):
    """Floating-point operations for a token, forward and backward, without recomputation.

    Attributes:
        fp8: in FP8 products.
        wide: in products of 16 bits.
    """

    fp8: float
    wide: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """How a model is computed; a family adds its sizes.

    Attributes:
        scan: whether layers are stacked, in one array for each parameter, and run in a loop; then
            compilation takes no longer for many layers than for one.
        remat: what the backward pass recomputes: None; "layer" saves only a layer's input and
            recomputes the rest; "layer_fp8" saves that input in FP8, rounded stochastically if
            `precision.stochastic` is set, and computes the gradients at the rounded input.
        param_dtype: the dtype of the parameters.
        dtype: the dtype of the residual stream and of everything that is not FP8.
        precision: what is FP8, a `coat.Precision` or its name. Embedding and head never are.
        axes: the mesh axes that parameters are sharded along.
        batch_axes: the mesh axes that the batch is sharded along.
    """

    STACK: ClassVar[str] = "layers"  # in the paths of parameters that `scan` stacks
    EMBEDDINGS: ClassVar[tuple[str, ...]] = ()  # in the paths of embeddings

    scan: bool = True
    remat: Literal["layer", "layer_fp8"] | None = None
    param_dtype: DTypeLike = jnp.float32
    dtype: DTypeLike = jnp.bfloat16
    precision: Precision | str = COAT
    axes: MeshAxes = MeshAxes()
    batch_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_fields(self)
        if len(set(self.batch_axes)) < len(self.batch_axes):
            raise UserError(f"batch_axes={self.batch_axes!r} must name each axis of the mesh once.")
        # One spelling each, so that equal configs compare equal.
        object.__setattr__(self, "precision", precision_of(self.precision))
        for name in ("param_dtype", "dtype"):
            object.__setattr__(self, name, _wide(name, getattr(self, name)))

    def in_precision(self, precision: Precision | str) -> Self:
        """The same model, all of it in this precision."""
        return dataclasses.replace(self, precision=precision)

    def is_stacked(self, path: tuple[Any, ...]) -> bool:
        """Whether the parameter of this path has a first axis over layers."""
        return self.scan and self.STACK in path

    def kept_gradients(self) -> tuple[str, ...]:
        """The first parts of the paths of parameters that the first and the last stage share."""
        return ()

    def work_per_token(self, sequence: int) -> Work | None:
        """The arithmetic for a token of a sequence of this length; None if it is not known."""
        return None


def require_capability(function: str, model: Any, *methods: str) -> None:
    """Raises unless the argument of a function is a model that has what the function needs."""
    if not isinstance(model, nnx.Module) or not all(hasattr(model, name) for name in methods):
        raise TypeError(
            f"{function} takes a model with {' and '.join(methods)}, such as a coat.models.Llama, "
            f"not {type(model).__name__}."
        )


def _wide(name: str, value: Any) -> np.dtype:
    try:
        dtype = jnp.dtype(value)
    except Exception:  # NumPy parses text as Python, which may raise anything
        raise UserError(f"{name}={brief(value)} is not a dtype. Write one as 'bfloat16'.") from None
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise UserError(
            f"{name}={dtype.name} must be float32, bfloat16 or another "
            "float of 16 bits or more. Use `precision` to choose what is FP8."
        )
    if dtype.itemsize > 4 and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise UserError(f"{name}={dtype.name} needs JAX_ENABLE_X64=1 in the environment.")
    return dtype

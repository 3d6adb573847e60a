"""Parameters of modules: how they are made, and over which mesh axes they are sharded.

A weight that widens, [D, F], is sharded along (fsdp, tensor); one that narrows, [F, D], along
(tensor, fsdp). So tensor parallelism shards the hidden width, and fully sharded data parallelism
the model's width, which is gathered when a layer needs it. Where fsdp would divide D inside a group
of the optimizer's moments, it shards F instead. The bias of a weight that widens is sharded along
tensor; other vectors are replicated.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from coat_jax.numerics import mesh_axes
from coat_jax.numerics.expansion import GROUP_SIZE
from coat_jax.validation import require_fields

LECUN = nnx.initializers.lecun_normal()


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """The names of the mesh axes over which weights are sharded.

    Attributes:
        fsdp: the axis that shards the model's width, or None.
        tensor: the axis that shards hidden widths and heads, or None.
        expert: the axis that shards the hidden width of each expert, and otherwise nothing but the
            batch; or None.
    """

    fsdp: str | None = None
    tensor: str | None = None
    expert: str | None = None

    def __post_init__(self) -> None:
        require_fields(self)

    @property
    def widening(self) -> tuple[str | None, ...]:
        """The axes of a weight from the model's width to a hidden one."""
        return (self.fsdp, self.tensor)

    def narrowing(self, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """The axes of a weight of this shape from a hidden width to the model's."""
        return with_whole_groups(shape, self.tensor, self.fsdp)

    @property
    def hidden_of_experts(self) -> tuple[str, ...]:
        """The axes that shard the hidden width of each expert."""
        return tuple(axis for axis in (self.expert, self.tensor) if axis is not None)


UNSHARDED = MeshAxes()


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    sharding: tuple[Any, ...] = (),
    *,
    init: Initializer = LECUN,
    dtype: DTypeLike = jnp.float32,
) -> nnx.Param:
    """A parameter with random values, sharded over the mesh that is set.

    They are drawn in FP32 and rounded, because an initializer draws other numbers for each dtype.
    """
    drawn_in = dtype if jnp.dtype(dtype).itemsize >= 4 else jnp.float32
    return nnx.Param(init(rngs.params(), shape, drawn_in).astype(dtype), **metadata(sharding))


def vector(
    size: int, sharding: tuple[str | None, ...] = (), *, fill: float, dtype: DTypeLike = jnp.float32
) -> nnx.Param:
    """A parameter that begins with equal values: the scale of a norm, or a bias."""
    return nnx.Param(jnp.full((size,), fill, dtype), **metadata(sharding))


def metadata(sharding: tuple[Any, ...] | None) -> dict[str, Any]:
    """The metadata of a variable that is sharded over these mesh axes."""
    return {"out_sharding": sharding} if sharding and any(sharding) else {}


def with_whole_groups(shape: tuple[int, ...], rows: Any, columns: Any) -> tuple[Any, Any]:
    """The mesh axes of a weight's rows and columns; all along its rows if columns would cut groups.

    An optimizer's moments have a scale for each group of columns. If the mesh that is set divided
    the columns inside a group, every step would gather the weight and its moments.
    """
    mesh = jax.sharding.get_abstract_mesh()
    both = (*jax.tree.leaves(rows), *jax.tree.leaves(columns))
    if not set(both) <= set(mesh.axis_names):
        return rows, columns
    parts = mesh_axes.shards(columns, mesh)
    inside = parts > 1 and shape[-1] % (parts * GROUP_SIZE) != 0
    divides = shape[-2] % mesh_axes.shards(both, mesh) == 0
    return (both, None) if inside and divides else (rows, columns)


def value_of(parameter: nnx.Param | None) -> Any:
    """The array of a parameter that may be left out."""
    return None if parameter is None else parameter[...]


def divides_evenly(count: int, axis: str | None) -> bool:
    """Whether an axis of the mesh divides an array axis of this size; true if it is not sharded."""
    mesh = jax.sharding.get_abstract_mesh()
    # Inside shard_map mesh axes are manual: `count` is what one device has.
    return axis not in mesh.auto_axes or count % mesh.shape[axis] == 0


def unshard(array: Any, axis: int) -> Any:
    """`array`, not sharded along this axis; None remains None."""
    if array is None:
        return None
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * array.ndim
    spec[axis] = None
    return lax.with_sharding_constraint(array, PartitionSpec(*spec))

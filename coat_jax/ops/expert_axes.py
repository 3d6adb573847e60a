"""How a mesh divides the tokens and the experts of `grouped_mlp`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from coat_jax.kernels.gemm import Operand


class ExpertAxes(NamedTuple):
    """The mesh axes over which tokens and experts are sharded.

    Along an axis of `tokens` alone, each device has tokens of its own and all experts. Along one
    of `hidden` alone, all devices have the same tokens, and their results are added up. Along an
    axis of both, the tokens of all devices are gathered, and the results summed and scattered.

    The columns of each expert are divided among devices, rather than whole experts: if there are
    not many more devices than a token has experts, it would be sent to nearly all of them anyway.
    So no more bytes are sent, and all devices have the same work and memory, whatever the router
    chooses.

    Attributes:
        tokens: those over which the rows of x are sharded.
        hidden: those over which the hidden columns of each expert are sharded.
    """

    tokens: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        """The axes along which tokens are sharded and not gathered."""
        return tuple(a for a in self.tokens if a not in self.hidden)

    @property
    def gathered(self) -> tuple[str, ...]:
        """The axes along which tokens are gathered."""
        return tuple(a for a in self.tokens if a in self.hidden)

    @property
    def all(self) -> tuple[str, ...]:
        """The axes of either kind."""
        return (*self.rows, *self.hidden)

    def on_mesh(self) -> "ExpertAxes":
        """The axes along which the mesh that is set has several devices."""
        mesh = jax.sharding.get_abstract_mesh()
        names = {a for a in mesh.axis_names if a not in mesh.manual_axes and mesh.shape[a] > 1}
        return ExpertAxes(*(tuple(a for a in axes if a in names) for axes in self))

    def spec(self, axes: str) -> Any:
        """The PartitionSpec of an array whose axes have these letters.

        They are t for tokens, r for the rows of experts, f for hidden columns, and any others.
        """
        over = {"t": self.tokens, "r": self.rows, "f": self.hidden}
        return PartitionSpec(*(over.get(axis) or None for axis in axes))

    def operand(self, axes: str) -> Any:
        """The specs of an operand whose `values` have these axes."""
        transposed = axes[-1] + axes[:-1]
        return Operand(*map(self.spec, (axes, transposed, "", axes[:-1])))

    def shard(self, f: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        """`f`, computed by each device for its own tokens and columns."""
        if not any(self):
            return f
        return jax.shard_map(f, in_specs=inputs, out_specs=outputs, check_vma=False)

    def gather(self, tree: Any) -> Any:
        """Arrays of tokens, with those of all devices along `gathered`."""

        def whole(x: Array) -> Array:
            return lax.all_gather(x, self.gathered, tiled=True) if x.ndim else x

        return jax.tree.map(whole, tree) if self.gathered else tree

    def reduce(self, x: Float[Array, "T N"]) -> Float[Array, "t N"]:
        """The sum over `hidden`, of which each device gets its own tokens."""
        x = lax.psum(x, tuple(a for a in self.hidden if a not in self.tokens))
        return lax.psum_scatter(x, self.gathered, tiled=True) if self.gathered else x


UNSHARDED = ExpertAxes()

"""How the tokens and the experts of `grouped_mlp` are sharded over a mesh."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from coat_jax.errors import UserError
from coat_jax.kernels.gemm import Operand
from coat_jax.numerics.mesh_axes import shards


class ExpertAxes(NamedTuple):
    """The mesh axes over which tokens and experts are sharded.

    Along an axis that is only in `tokens`, each device has tokens of its own and all columns. Along
    one that is only in `hidden`, all devices have the same tokens, and their results are summed.
    Along an axis in both, tokens are gathered, and results are summed and scattered.

    Each device has some columns of every expert, rather than some whole experts. All devices then
    have the same work and memory, whatever the router chooses. They send no more bytes: unless
    there are many more devices than a token has experts, nearly all would need the token anyway.

    Attributes:
        tokens: the axes over which x is sharded.
        hidden: the axes over which the hidden columns of each expert are sharded.
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
        """All axes over which something is sharded."""
        return (*self.rows, *self.hidden)

    def on_mesh(self) -> "ExpertAxes":
        """Those of the axes along which the current mesh has several devices."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.axis_names and (unknown := {*self.tokens, *self.hidden} - {*mesh.axis_names}):
            raise UserError(f"{self} has {unknown}, and the mesh only {mesh.axis_names}.")
        names = {a for a in mesh.axis_names if a not in mesh.manual_axes and mesh.shape[a] > 1}
        return ExpertAxes(*(tuple(a for a in axes if a in names) for axes in self))

    def require_whole_shards(self, tokens: int, hidden: int, together: int) -> None:
        """Raises unless tokens, and hidden columns in blocks of `together`, can be sharded."""
        for what, count, axes, block in (
            ("tokens", tokens, self.tokens, 1),
            ("hidden", hidden, self.hidden, together),
        ):
            devices = shards(axes, jax.sharding.get_abstract_mesh())
            if devices > 1 and count % (devices * block):
                raise UserError(
                    f"{what}={count} cannot be divided among the {devices} devices along "
                    f"{' and '.join(map(repr, axes))} of the mesh in blocks of {block}: use fewer "
                    f"devices there, or a multiple of {devices * block}."
                )

    def spec(self, axes: str) -> Any:
        """The PartitionSpec of an array, from a letter for each of its axes.

        t stands for tokens, r for the rows of experts, f for hidden columns; others are not
        sharded.
        """
        over = {"t": self.tokens, "r": self.rows, "f": self.hidden}
        return PartitionSpec(*(over.get(axis) or None for axis in axes))

    def operand(self, axes: str) -> Any:
        """The specs of an operand whose `values` have these axes."""
        transposed = axes[-1] + axes[:-1]
        return Operand(*map(self.spec, (axes, transposed, "", axes[:-1])))

    def shard(self, f: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        """Returns `f` as each device computes it, for its own tokens and columns."""
        if not any(self):
            return f
        return jax.shard_map(f, in_specs=inputs, out_specs=outputs, check_vma=False)

    def gather(self, tree: Any) -> Any:
        """Gathers arrays of tokens from all devices along `gathered`."""

        def whole(x: Array) -> Array:
            return lax.all_gather(x, self.gathered, tiled=True) if x.ndim else x

        return jax.tree.map(whole, tree) if self.gathered else tree

    def reduce(self, x: Float[Array, "T N"]) -> Float[Array, "t N"]:
        """Sums over `hidden`; each device gets the results of its own tokens."""
        x = lax.psum(x, tuple(a for a in self.hidden if a not in self.tokens))
        return lax.psum_scatter(x, self.gathered, tiled=True) if self.gathered else x


UNSHARDED = ExpertAxes()

"""Parameters and their optimizer state, split into parts that are stepped one after another.

    for each part:  state, gradients = parts.state(part, gradients)
                    params, state = optimizer.step(parts.params(part), gradients, state)
                    parts.update(part, (params, state))

A part is a list of parameter indices. Its parameters and the leaves of the state that follow them
are passed as trees of the full structure, in which all other leaves are None. The optimizer must
update each parameter by itself. State in host memory is copied to the device and back part by part.
After the step of part i, its state is copied to the host and that of part i + 1 to the device, at
the same time and beside whatever is computed next. Part i + 1 is stepped when both have arrived.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array

from coat_jax.errors import UserError
from coat_jax.optax.states.host_memory import DEVICE, HOST, is_on_host
from coat_jax.optax.states.sharding import followed_indices, leaves_some_out


class Parts:
    """The parameters and the state of an optimizer, stepped one part at a time.

    A leaf of the state belongs to the parameter that it follows. Leaves that follow none, such as
    the count of steps, belong to every part. All parts compute the same new value of them; if a
    part is skipped, they keep the old one.
    """

    def __init__(self, params: optax.Params, state: Any):
        self._params, self._structure = jax.tree.flatten(params)
        self._state, self._state_structure = jax.tree.flatten(state)
        self._follows = followed_indices(state, params)
        self._masked = leaves_some_out(state)
        self._before = list(self._state)
        self._on_host = [is_on_host(leaf) for leaf in self._state]
        self._leaving: list[int] = []  # leaves of the part before, being copied to the host
        self._stepped: list[Array] | None = None  # the same, on the device
        leaves = jax.tree.leaves_with_path(state)
        for (path, leaf), on_host, param in zip(leaves, self._on_host, self._follows, strict=True):
            if on_host and param is None:
                raise UserError(
                    f"state{jax.tree_util.keystr(path)} of shape {leaf.shape} is in host memory, "
                    "and all parts need it. Make the state with init(params)."
                )

    def sizes_on_host(self) -> list[list[int]]:
        """For each parameter, the sizes in bytes of the arrays in host memory that follow it."""
        sizes: list[list[int]] = [[] for _ in self._params]
        for leaf, on_host, param in zip(self._before, self._on_host, self._follows, strict=True):
            if on_host and param is not None:
                sizes[param].append(leaf.nbytes)
        return sizes

    def params(self, part: Sequence[int]) -> optax.Params:
        """The parameters of a part."""
        return self.like_params(part, [self._params[i] for i in part])

    def like_params(self, part: Sequence[int], leaves: Sequence[Any]) -> Any:
        """A tree like `params(part)` with these leaves, such as the gradients of the part."""
        by_place = dict(zip(part, leaves, strict=True))
        return jax.tree.unflatten(self._structure, map(by_place.get, range(len(self._params))))

    def state(self, part: Sequence[int], gradients: Any) -> tuple[Any, Any]:
        """The state of a part before the step, on the device; and the gradients of the part.

        Leaves in host memory are copied to the device once the previous part has been stepped. The
        results are available when that part has left the device.
        """
        if self._masked and len(part) < len(self._params):
            raise ValueError(
                "The optimizer has masked states, as optax.partition, optax.masked and fp8_muon "
                "make them: they know parameters by their labels, and cannot step some of them "
                "alone. Here use an optimizer that updates every parameter in the same way."
            )
        taken = [param is None or param in part for param in self._follows]
        leaves: list[Any] = [
            leaf if here else None for leaf, here in zip(self._before, taken, strict=True)
        ]
        arriving = [i for i, here in enumerate(taken) if here and self._on_host[i]]
        if arriving:
            after: Any = self._stepped
            if after is None:
                # Depends on everything in host memory, too: XLA then knows these arrays from the
                # first copy on, and starts each later copy once the previous part was stepped.
                hosted = [leaf for leaf in self._before if is_on_host(leaf)]
                after = gradients, hosted
            arrived, _ = lax.optimization_barrier(([leaves[i] for i in arriving], after))
            arrived = jax.device_put(arrived, DEVICE)
            left = [self._state[i] for i in self._leaving]
            gradients, arrived, left = lax.optimization_barrier((gradients, arrived, left))
            for i, leaf in zip([*arriving, *self._leaving], [*arrived, *left], strict=True):
                (leaves if i in arriving else self._state)[i] = leaf
        return jax.tree.unflatten(self._state_structure, leaves), gradients

    def update(
        self,
        part: Sequence[int],
        updated: tuple[Any, Any],
        skipped: bool | Array = False,
        *,
        before: Any = None,
    ) -> Any:
        """Stores the new parameters and the new state of a part.

        Args:
            part: the parameters' indices.
            updated: what the step of an optimizer returned.
            skipped: whether a part was not updated, so that the step does not count.
            before: arrays that may only be used after this update. Use what is returned.

        Returns:
            `before`, behind an optimization barrier.
        """
        stepped = jax.tree.leaves(updated[1])
        if before is not None:
            updated, before = lax.optimization_barrier((updated, before))
        params, state = updated
        for i, leaf in zip(part, jax.tree.leaves(params), strict=True):
            self._params[i] = leaf
        places = [i for i, param in enumerate(self._follows) if param is None or param in part]
        leaving = {}
        for i, leaf, no_barrier in zip(places, jax.tree.leaves(state), stepped, strict=True):
            if self._follows[i] is None and skipped is not False:
                self._state[i] = jnp.where(skipped, self._before[i], leaf)
            elif self._on_host[i]:
                # The barrier would let XLA delay this copy to the host.
                leaving[i] = no_barrier
            else:
                self._state[i] = leaf
        if leaving:
            self._leaving, self._stepped = list(leaving), list(leaving.values())
            for i, leaf in zip(self._leaving, jax.device_put(self._stepped, HOST), strict=True):
                self._state[i] = leaf
        return before

    def whole(self) -> tuple[Any, Any]:
        """All parameters and the whole state."""
        return (
            jax.tree.unflatten(self._structure, self._params),
            jax.tree.unflatten(self._state_structure, self._state),
        )

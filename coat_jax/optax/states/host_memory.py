"""Arrays in the memory of the host, and copies of them that run beside the device's kernels.

The memory of an array is part of its type, so it is known while a function is traced. XLA starts a
copy as soon as its operands are ready, and waits for it where its result is used. It copies two
arrays at a time, or more with the compiler option `COPIES_AT_ONCE`.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array

from coat_jax.errors import UserError

KIND = "pinned_host"
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
# An option of XLA: copy as many arrays at a time as there are.
COPIES_AT_ONCE: dict[str, bool | int | str] = {
    "xla_gpu_experimental_parallel_async_compute_limit": 1000
}


def is_on_host(leaf: Any) -> bool:
    """Whether an array, or a type of one, is in host memory."""
    kind = leaf if isinstance(leaf, jax.core.ShapedArray) else jax.typeof(leaf)
    return bool(kind.memory_space == HOST)


def on_device(tree: Any) -> Any:
    """A tree with copies on the device of those arrays that are in host memory."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, DEVICE) if is_on_host(leaf) else leaf, tree
    )


def copy_hosted(tree: Any) -> Any:
    """Copies the arrays of a tree that are in host memory, within host memory.

    For readers that run while steps overwrite the originals. NumPy's view of an array on the device
    is a copy. Its view of an array in host memory is not, and would keep JAX from donating it.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_on_host(leaf)]
    shardings = [leaves[i].sharding for i in places]
    if places:
        copies = jax.jit(_through_device, out_shardings=shardings)([leaves[i] for i in places])
        for i, leaf in zip(places, copies, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def _through_device(arrays: list[Array]) -> list[Array]:
    """Copies through the device, which holds one array at a time."""
    copies: list[Array] = []
    for array in arrays:
        (source,), copies[-1:] = lax.optimization_barrier(([array], copies[-1:]))
        on_device = lax.optimization_barrier(jax.device_put(source, DEVICE))
        copies.append(jax.device_put(on_device, HOST))
    return copies


def host_sharding(sharding: Sharding) -> Sharding:
    """The sharding of an array whose shards are in the memory of their devices' hosts."""
    try:
        return sharding.with_memory_kind(KIND)
    except ValueError as error:
        raise UserError(
            f"The devices cannot reach the memory of their host ({error}). Keep the optimizer's "
            "state on them: leave out in_host_memory, or --optimizer.offload in the trainer."
        ) from error

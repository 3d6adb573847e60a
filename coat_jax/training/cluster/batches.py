"""From a process's rows to an array over the mesh.

    [rows of this process, S]  ->  [accumulation, rows of all, S], rows sharded along data and fsdp

Positions and segments are left out if no row holds two documents, because attention is faster
without them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from coat_jax.training.cluster.mesh import batch_sharding, share_of_process
from coat_jax.training.config import TrainConfig
from coat_jax.training.data import Batch, Loader, load
from coat_jax.training.data.splits import Split


def open_data(config: TrainConfig, mesh: Mesh, split: Split) -> Loader:
    """The rows that this process loads of a split; held-out ones do not depend on the seed."""
    share = share_of_process(mesh)
    return load(
        config.data,
        split=split,
        batch=config.global_batch_size,
        sequence=config.sequence_length,
        vocab=config.model.vocab,
        seed=config.seed if split == "train" else 0,
        process=share.part,
        processes=share.parts,
        epochs=None if split == "train" else 1,
    )


def place(batch: Batch, mesh: Mesh, *, microbatches: int, packed: bool) -> Any:
    """A batch on the mesh, divided into microbatches."""

    def placed(array: np.ndarray) -> jax.Array:
        rows = array.reshape(microbatches, -1, array.shape[-1])
        return jax.make_array_from_process_local_data(batch_sharding(mesh), rows)

    tokens, labels, positions, segments = batch
    needed = Batch(tokens, labels, *((positions, segments) if packed else (None, None)))
    return jax.tree.map(placed, needed)


def abstract_batch(config: TrainConfig, mesh: Mesh, *, packed: bool) -> Any:
    """The shapes of what `place` returns."""
    shape = (config.gradient_accumulation_steps, config.microbatch, config.sequence_length)
    array: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    return Batch(array, array, *((array, array) if packed else (None, None)))

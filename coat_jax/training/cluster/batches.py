"""From a process's rows to an array over the mesh.

    [rows of this process, ...]  ->  [accumulation, rows of all, ...]

Rows are sharded along data and fsdp.
"""

from typing import Any

import jax
from jax.sharding import Mesh

from coat_jax.training.cluster.mesh import batch_sharding, share_of_process
from coat_jax.training.config import TrainConfig
from coat_jax.training.data import Loader
from coat_jax.training.data.sources import Split
from coat_jax.training.families import family_of


def open_data(config: TrainConfig, mesh: Mesh, split: Split) -> Loader:
    """Opens the rows that this process loads; held-out ones do not depend on the seed."""
    part, parts = share_of_process(mesh)
    seed = config.seed if split == "train" else 0
    open_rows = family_of(config.model).rows
    return Loader(
        open_rows(config.model, config.data, split, config.sequence_length, seed),
        batch=config.global_batch_size,
        seed=seed,
        process=part,
        processes=parts,
        epochs=None if split == "train" else 1,
    )


def place(batch: Any, mesh: Mesh, *, microbatches: int) -> Any:
    """Returns a batch on the mesh, divided into microbatches."""
    return jax.tree.map(
        lambda rows: jax.make_array_from_process_local_data(
            batch_sharding(mesh), rows.reshape(microbatches, -1, *rows.shape[1:])
        ),
        batch,
    )


def abstract_batch(config: TrainConfig, mesh: Mesh, example: Any = None) -> Any:
    """Returns the shapes of a placed batch of rows like `example`, by default the family's."""
    if example is None:
        example = family_of(config.model).example(config.model, config.sequence_length)
    rows = config.gradient_accumulation_steps, config.microbatch
    return jax.tree.map(
        lambda row: jax.ShapeDtypeStruct(
            (*rows, *row.shape), row.dtype, sharding=batch_sharding(mesh)
        ),
        example,
    )

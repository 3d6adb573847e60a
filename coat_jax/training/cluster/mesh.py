"""The devices of a run as a mesh with four axes, and how arrays are sharded over them.

parameters    sharded along fsdp, expert and tensor, as their modules say
batches       [rows of this process, ...] -> [accumulation, rows of all, ...], along data, fsdp and
              expert
the rest      replicated
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from coat_jax.errors import UserError
from coat_jax.printable import amount
from coat_jax.training.config import MeshConfig, TrainConfig
from coat_jax.training.config.run import BATCH_AXES
from coat_jax.training.data import Loader
from coat_jax.training.data.sources import Split
from coat_jax.training.families import family_of

NAMES = ("data", "fsdp", "expert", "tensor")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh over `devices`, by default all there are, with automatic axes."""
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(config, name) for name in NAMES]
    named = math.prod(size for size in sizes if size != -1)
    left, rest = divmod(len(devices), named)
    if rest or sizes.count(-1) > 1 or (-1 not in sizes and left != 1):
        described = ", ".join(f"{name}={size}" for name, size in zip(NAMES, sizes, strict=True))
        raise UserError(
            f"A mesh of {described} needs {'a multiple of ' if -1 in sizes else ''}"
            f"{amount(named, 'device')}, and JAX finds {len(devices)}. Change its sizes; only one "
            "may be -1, which takes what is left."
        )
    sizes = [left if size == -1 else size for size in sizes]
    return jax.make_mesh(sizes, NAMES, devices=devices, axis_types=(AxisType.Auto,) * len(NAMES))


def batch_parts(mesh: Mesh) -> int:
    """Returns how many devices see different rows of a batch."""
    return math.prod(mesh.shape[name] for name in BATCH_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch in microbatches: [accumulation, rows, sequence]."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def everywhere(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that are replicated on all devices."""
    return NamedSharding(mesh, PartitionSpec())


def share_of_process(mesh: Mesh) -> tuple[int, int]:
    """Returns which part of a batch this process loads, and how many equal parts there are.

    Processes that differ only along `tensor` load the same rows.
    """
    rows = mesh.devices.reshape(batch_parts(mesh), -1)  # the tensor axis is the last
    mine = [i for i, devices in enumerate(rows) if set(devices) & set(mesh.local_devices)]
    parts, left = divmod(len(rows), len(mine))
    if left or mine != list(range(mine[0], mine[-1] + 1)) or mine[0] % len(mine):
        raise UserError(
            f"This process has devices at places {mine} of the {len(rows)} that see different "
            "rows, which is not an equal part of them. Give mesh.data * mesh.fsdp * mesh.expert or "
            "mesh.tensor a size that whole machines share equally."
        )
    return mine[0] // len(mine), parts


def open_data(config: TrainConfig, mesh: Mesh, split: Split) -> Loader:
    """Opens the rows that this process loads; held-out ones do not depend on the seed.

    Raises UserError if the devices cannot share a batch equally.
    """
    sharing = batch_parts(mesh)
    if config.microbatch % sharing:
        batch, steps = config.global_batch_size, config.gradient_accumulation_steps
        raise UserError(
            f"global_batch_size={batch} in gradient_accumulation_steps={steps} are "
            f"{config.microbatch} sequences at a time, which {sharing} devices (mesh.data * "
            "mesh.fsdp * mesh.expert) cannot share equally. Lower gradient_accumulation_steps, or "
            f"make global_batch_size a multiple of {sharing * steps}."
        )
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
        example = family_of(config.model).example(config)
    rows = config.gradient_accumulation_steps, config.microbatch
    return jax.tree.map(
        lambda row: jax.ShapeDtypeStruct(
            (*rows, *row.shape), row.dtype, sharding=batch_sharding(mesh)
        ),
        example,
    )

"""The memory that a run needs on each device, reported before the first step.

    parameters, optimizer state    their shards; only that part of the state which is on the device
    gradients                      like parameters; in FP32 as well where they are accumulated. If
                                   released, those of the largest layer, or embedding, or head
    saved activations              what `jax.vjp` saves of one microbatch: counted, not estimated

The peak memory is XLA's own account of the compiled step. It contains, besides these, work space:
gathered weights, gradients of activations, the logits of a chunk.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx
from rich.table import Table

from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.optax.states import host_memory
from coat_jax.training.config import TrainConfig
from coat_jax.training.families import family_of
from coat_jax.training.step import State, split_trained

ADVICE = (
    "What helps, the cheapest first: --optimizer.name fp8_adamw; --param_dtype bfloat16; "
    "--precision coat_lean; more --gradient_accumulation_steps; a smaller --global_batch_size; "
    "--remat layer_fp8; --optimizer.offload true; more devices along --mesh.fsdp."
)


LABELS = {
    "optimizer": "optimizer state",
    "activations": "saved activations",
    "peak": "peak memory of the step",
    "limit": "the device's limit",
    "on_host": "optimizer state on the host",
}


class DeviceMemory(NamedTuple):
    """Bytes on each device; `limit` is None if the device does not report it."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    peak: int
    limit: int | None
    on_host: int = 0


def account(
    config: TrainConfig, state: State, compiled: Any, *, batch_parts: int, device: jax.Device
) -> DeviceMemory:
    """Returns the memory of a compiled step and its abstract state on each device."""
    moments = jax.tree.leaves(state.moments)
    on_host = _shard_bytes([m for m in moments if m.sharding.memory_kind == host_memory.KIND])
    used = compiled.memory_analysis()
    peak = used.argument_size_in_bytes + used.temp_size_in_bytes
    peak += used.output_size_in_bytes - used.alias_size_in_bytes
    rows = config.microbatch // batch_parts
    return DeviceMemory(
        parameters=_shard_bytes(state.params),
        gradients=_gradients(config, split_trained(config, state.params)[0]),
        optimizer=_shard_bytes(moments) - on_host,
        activations=saved_activations(config, rows),
        peak=peak,
        limit=(device.memory_stats() or {}).get("bytes_limit"),
        on_host=on_host,
    )


def _gradients(config: TrainConfig, params: Any) -> int:
    """Returns the bytes of the gradients that exist at the same time."""
    if config.optimizer.release_gradients:
        outside = {name: leaf for name, leaf in params.items() if name != config.model.STACK}
        shared = _shard_bytes([outside.pop(name) for name in config.model.kept_gradients()])
        layers = params[config.model.STACK].values()
        return shared + max(map(_shard_bytes, [*layers, *outside.values()]))
    sums = _shard_bytes(params, itemsize=4) if config.gradient_accumulation_steps > 1 else 0
    return _shard_bytes(params) + sums


def _shard_bytes(tree: Any, itemsize: int | None = None) -> int:
    """Returns the bytes of one device's shards, in the leaves' dtypes or in another one."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * (itemsize or leaf.dtype.itemsize)
        for leaf in jax.tree.leaves(tree)
    )


def saved_activations(config: TrainConfig, rows: int) -> int:
    """Returns the bytes that are saved for the backward pass, besides parameters.

    A tensor axis of the mesh shards most of them further.
    """
    family = family_of(config.model)
    graph, params = models.abstract(config.model, module=family.module)
    batch = jax.tree.map(
        lambda row: jax.ShapeDtypeStruct((rows, *row.shape), row.dtype),
        family.example(config),
    )
    # Parameters are saved by reference, or cast.
    weights = {leaf.shape for leaf in jax.tree.leaves(params)}
    pullback = jax.eval_shape(
        lambda params, batch: jax.vjp(lambda p: nnx.merge(graph, p).loss(batch).mean, params)[1],
        params,
        batch,
    )
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(pullback)
        if leaf.shape not in weights
    )


def table(memory: DeviceMemory) -> Table:
    """Returns the account as a table to print."""
    size, unit = (1e9, "GB") if memory.peak >= 1e9 else (1e6, "MB")
    found = Table("", unit, title="Memory of each device", title_justify="left")
    found.columns[1].justify = "right"
    for name, count in memory._asdict().items():
        if count:
            label = LABELS.get(name, name)
            found.add_row(label, f"{count / size:.2f}", end_section=name == "activations")
    return found


@contextlib.contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Turns JAX's report of exhausted memory into one line with advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise UserError(f"The device's memory is used up ({reason}). {ADVICE}") from error

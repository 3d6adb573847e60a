"""The memory that a run needs on each device, reported before the first step.

    parameters, optimizer state    their shards; only that part of the state which is on the device
    gradients                      like parameters; in FP32 as well where they are accumulated. If
                                   they are released: of the largest layer, or embedding, or head
    saved activations              what `jax.vjp` saves of one microbatch: counted, not estimated
    peak memory                    the compiled step's arguments, results and temporary arrays

The peak memory is XLA's own account. It contains, besides the rows above, work space: gathered
weights, gradients of activations, the logits of a chunk.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.optax.states import host_memory
from coat_jax.precision import COAT_LEAN, precision_of
from coat_jax.training.config import TrainConfig
from coat_jax.training.state import State

if TYPE_CHECKING:
    from rich.table import Table


class OutOfMemory(UserError):
    """The device is out of memory; the message says what to lower."""


class DeviceMemory(NamedTuple):
    """Bytes on each device.

    Attributes:
        parameters: the device's shards.
        gradients: the shards of those that exist at a time, and of FP32 sums if they accumulate.
        optimizer: the shards of the optimizer's state on the device.
        activations: saved of one microbatch.
        peak: the most memory that the compiled step takes at any time, these included.
        limit: the device's memory; None if the device does not report it.
        on_host: the shards of the optimizer's state in host memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    peak: int
    limit: int | None
    on_host: int = 0

    @property
    def fits(self) -> bool:
        """Whether the peak memory is within the limit, as far as that is known."""
        return self.limit is None or self.peak <= self.limit


def account(
    config: TrainConfig, state: State, compiled: Any, *, batch_parts: int, device: jax.Device
) -> DeviceMemory:
    """The memory that a run needs.

    Args:
        config: the run.
        state: as `abstract_state` gives it.
        compiled: the step.
        batch_parts: how many devices see different rows.
        device: one of them.
    """
    on_host = _shard_bytes([leaf for leaf in jax.tree.leaves(state.moments) if _on_host(leaf)])
    used = compiled.memory_analysis()
    peak = used.argument_size_in_bytes + used.temp_size_in_bytes
    peak += used.output_size_in_bytes - used.alias_size_in_bytes
    return DeviceMemory(
        parameters=_shard_bytes(state.params),
        gradients=_gradients(config, state.params),
        optimizer=_shard_bytes(state.moments) - on_host,
        activations=saved_activations(
            config.model, config.microbatch // batch_parts, config.sequence_length
        ),
        peak=peak,
        limit=(device.memory_stats() or {}).get("bytes_limit"),
        on_host=on_host,
    )


def _gradients(config: TrainConfig, params: Any) -> int:
    """The bytes of the gradients that exist at the same time."""
    if config.optimizer.release_gradients:
        outside = {name: leaf for name, leaf in params.items() if name != "layers"}
        kept = _shard_bytes(outside.pop("embed")) if config.model.tied else 0  # until the end
        return kept + max(map(_shard_bytes, [*params["layers"].values(), *outside.values()]))
    in_fp32 = sum(math.prod(shape) * 4 for shape, _ in _shards(params))
    return _shard_bytes(params) + (in_fp32 if config.gradient_accumulation_steps > 1 else 0)


def saved_activations(config: models.Config, rows: int, sequence: int) -> int:
    """The bytes that are saved for the backward pass, besides parameters.

    A tensor axis of the mesh shards most of them further.
    """
    graph, params = models.abstract(config)
    tokens = jax.ShapeDtypeStruct((rows, sequence), jnp.int32)

    def pull(params: Any, tokens: Any) -> Any:
        return jax.vjp(lambda p: nnx.merge(graph, p).loss(tokens, tokens), params)[1]

    # Parameters are saved by reference, or cast.
    weights = {leaf.shape for leaf in jax.tree.leaves(params)}
    saved = jax.tree.leaves(jax.eval_shape(pull, params, tokens))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in saved if leaf.shape not in weights)


def table(memory: DeviceMemory) -> "Table":
    """The account as a table to print."""
    from rich.table import Table

    shown = Table(title="Memory of each device", title_justify="left")
    shown.add_column()
    size, unit = (1e9, "GB") if memory.peak >= 1e9 else (1e6, "MB")
    shown.add_column(unit, justify="right")
    shown.add_row("parameters", f"{memory.parameters / size:.2f}")
    shown.add_row("gradients", f"{memory.gradients / size:.2f}")
    shown.add_row("optimizer state", f"{memory.optimizer / size:.2f}")
    shown.add_row("saved activations", f"{memory.activations / size:.2f}")
    shown.add_section()
    shown.add_row("peak memory of the step", f"{memory.peak / size:.2f}")
    if memory.limit is not None:
        shown.add_row("the device's limit", f"{memory.limit / size:.2f}")
    if memory.on_host:
        shown.add_row("optimizer state in the host's memory", f"{memory.on_host / size:.2f}")
    return shown


def advice(config: TrainConfig, *, batch_parts: int) -> str:
    """What to lower, the cheapest first, for the command line."""
    remedies = []
    int8 = precision_of(config.model.precision).int8_forward
    if config.optimizer.name != "fp8_adamw":
        remedies.append("--optimizer.name fp8_adamw")
    if config.model.param_dtype == jnp.float32:
        remedies.append("--param_dtype bfloat16")
    if config.model.precision != dataclasses.replace(COAT_LEAN, int8_forward=int8):
        lean = "--model.precision.attention_block 16" if int8 else "--precision coat_lean"
        remedies.append(lean)
    if config.microbatch > batch_parts:
        parts = 2 * config.gradient_accumulation_steps
        if not config.optimizer.release_gradients:  # which needs one microbatch
            remedies.append(
                f"--gradient_accumulation_steps {parts}"
                if config.global_batch_size % (parts * batch_parts) == 0
                else "--gradient_accumulation_steps"
            )
        remedies.append(f"a --global_batch_size under {config.global_batch_size}")
    if config.model.remat != "layer_fp8":
        remedies.append("--remat layer_fp8")
    if not config.optimizer.offload and config.optimizer.transformation is None:
        remedies.append("--optimizer.offload true")
    remedies.append("more devices along --mesh.fsdp")
    return f"What helps: {'; '.join(remedies)}."


@contextlib.contextmanager
def explaining_out_of_memory(config: TrainConfig, *, batch_parts: int) -> Iterator[None]:
    """Turns JAX's report of exhausted memory into one line with advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise OutOfMemory(
            f"The device's memory is used up ({reason}). {advice(config, batch_parts=batch_parts)}"
        ) from error


def _shards(tree: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of what one device holds of each leaf."""
    leaves = jax.tree.leaves(tree)
    return [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves]


def _on_host(leaf: Any) -> bool:
    return bool(leaf.sharding.memory_kind == host_memory.KIND)


def _shard_bytes(tree: Any) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in _shards(tree))

"""Which experts tokens choose: how many choices change with the precision, and how loads differ."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from coat_jax import BF16, Precision, models, ops
from coat_jax.training.config import TrainConfig
from coat_jax.training.data import Batch
from experiments.row_files import rounded


def routes_of(
    params: nnx.State, config: TrainConfig, mesh: Mesh, batches: Sequence[Batch]
) -> dict[str, list[float]]:
    """For each batch, the share of choices that are others in BF16, and the load of the largest.

    The router itself is in FP32: its inputs differ. A load is in units of the mean, and the largest
    is a mean over layers.
    """
    own, in_bf16 = (
        _program(precision, config, mesh) for precision in (config.model.precision, BF16)
    )
    changed, largest = [], []
    with jax.set_mesh(mesh):
        for batch in batches:
            chosen, other = own(params, batch), in_bf16(params, batch)
            same = jnp.any(chosen[..., None] == other[..., None, :], axis=-1)
            changed.append(rounded(1 - float(jnp.mean(same))))
            load = jax.nn.one_hot(chosen, config.model.experts.count).mean((1, 2, 3))
            largest.append(rounded(float((load.max(1) / load.mean(1)).mean())))
    return {"changed_choices": changed, "largest_load": largest}


def _program(precision: Precision, config: TrainConfig, mesh: Mesh) -> Any:
    graph = models.abstract(replace(config.model_on_mesh, precision=precision), mesh=mesh)[0]
    return jax.jit(partial(_choices, graph))


def _choices(graph: Any, params: nnx.State, batch: Batch) -> Int[Array, "L B S k"]:
    found, route = [], ops.route

    def record(*args: Any, **how: Any) -> Any:
        experts, weights = route(*args, **how)
        found.append(experts)
        return experts, weights

    model = nnx.merge(graph, params)
    x = model.embed_tokens(batch.tokens.reshape(-1, batch.tokens.shape[-1]))
    with mock.patch.object(ops, "route", record):
        for layer in model.layers:
            x, _ = layer.with_routing(x)
    return jnp.stack(found)

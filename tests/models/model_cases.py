"""A small model that has learnt some Python, and what other tests of models share."""

import ast
import dataclasses
import functools
import inspect
import textwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType
from small_model import QUICK, filled
from small_model import SMALL as PLAIN

from coat_jax import models, nn
from coat_jax.models import lazy_arrays

SMALL = dataclasses.replace(PLAIN, qk_norm="head")
AXES = {"axes": nn.MeshAxes("fsdp", "tensor"), "batch_axes": ("data", "fsdp")}
STEPS, BATCH, LENGTH = 60, 8, 32


def automatic_mesh(*sizes, names=("data", "fsdp", "tensor")):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def variant(**changes):
    return dataclasses.replace(SMALL, **changes)


def batches(number):
    """Python's own sources, in which much repeats: [number, BATCH, LENGTH + 1] bytes."""
    text = "".join(inspect.getsource(module) for module in (ast, dataclasses, functools, textwrap))
    data = np.frombuffer(text.encode(), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(data) - LENGTH - 1, (number, BATCH))
    return jax.device_put(data[starts[..., None] + np.arange(LENGTH + 1)].astype(np.int32))


def loss_of(graph, state, tokens):
    return nnx.merge(graph, state).loss(models.Batch(tokens[:, :-1], tokens[:, 1:]), chunk=16).mean


class Answer(NamedTuple):
    """The loss of a model on one batch, and its gradient by parameter."""

    loss: Any
    gradients: dict[str, Any]


def answer(model, tokens):
    graph, state = nnx.split(model)
    program = jax.jit(jax.value_and_grad(functools.partial(loss_of, graph)), compiler_options=QUICK)
    loss, gradients = program(state, tokens)
    return Answer(float(loss), by_name(gradients))


def by_name(state):
    """Every parameter as FP32, stacked layers and lists of layers alike."""
    found: dict[str, Any] = {}
    for path, leaf in nnx.to_flat_state(state):
        value = np.asarray(leaf[...], np.float32)
        if path[0] != "layers" or isinstance(path[1], int):
            found[".".join(map(str, path))] = value
        else:
            found |= {".".join(("layers", str(i), *path[1:])): v for i, v in enumerate(value)}
    return found


@functools.cache
def trained_state():
    """The parameters of SMALL after some steps of Adam, as a state of stacked layers.

    Random parameters would not do: their gradients are mostly noise.
    """
    graph, state = nnx.split(filled(variant(dtype=jnp.float32)))
    tx = optax.adam(5e-3)

    def step(carry, tokens):
        state, moments = carry
        loss, gradients = jax.value_and_grad(functools.partial(loss_of, graph))(state, tokens)
        updates, moments = tx.update(gradients, moments)
        return (optax.apply_updates(state, updates), moments), loss

    run = jax.jit(lambda carry, tokens: jax.lax.scan(step, carry, tokens), compiler_options=QUICK)
    (state, _), losses = run((state, tx.init(state)), batches(STEPS))
    assert losses[-10:].mean() < 0.6 * losses[0]
    return state


def trained(config, mesh=None):
    """The trained model computed as `config` says, on a mesh if there is one."""
    stacked = nnx.merge(models.abstract(variant(dtype=jnp.float32))[0], trained_state())
    return lazy_arrays.load(config, lazy_arrays.parameters_of(stacked), mesh=mesh)


def cosine(a, b):
    a, b = np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

"""A small run, and its step by itself: what tests of the trainer share."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import quick
from flax import nnx
from small_model import SMALL as MODEL

from coat_jax.training.cluster.mesh import everywhere, make_mesh, place
from coat_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)
from coat_jax.training.data import Batch, DataConfig
from coat_jax.training.setup import prepare
from coat_jax.training.step import State, split_trained

DOCS = Path(__file__).parents[2] / "docs"
SMALL = TrainConfig(
    model=MODEL,
    # Found at once; the files of the corpus, which is the default, take a second to list.
    data=DataConfig(train=(str(DOCS / "training.md"),), held_out=(str(DOCS / "architecture.md"),)),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0.1),
    mesh=MeshConfig(data=1, fsdp=1, tensor=1),
    evaluation=EvaluationConfig(every=0),
    checkpoint=CheckpointConfig(every=0),
    total_steps=10,
    global_batch_size=16,
    sequence_length=32,
    cache=None,
)
ONE = (1, 1, 1)


def small(model: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None, **changes):
    """SMALL with these changes; `model` and `optimizer` are changes to their fields."""
    return dataclasses.replace(
        SMALL,
        model=dataclasses.replace(MODEL, **(model or {})),
        optimizer=dataclasses.replace(SMALL.optimizer, **(optimizer or {})),
        **changes,
    )


class Stepper:
    """A step, compiled when it is first asked for, and how to begin."""

    def __init__(self, config: TrainConfig, mesh: jax.sharding.Mesh):
        self.config = config
        self.mesh = mesh
        self.setup = prepare(config, mesh)
        self.abstract = self.setup.abstract

    @functools.cached_property
    def program(self) -> Any:
        return self.setup.lower().compile()

    @functools.cached_property
    def init(self) -> Any:
        """From parameters to moments."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract.moments)
        how = {"out_shardings": shardings, "compiler_options": quick.OPTIONS}
        return jax.jit(self.setup.optimizer.init, **how)

    def state(self, seed: int = 0) -> State:
        """A state with random parameters. `new_state` takes longer: it compiles them."""
        rng = np.random.default_rng(seed)

        def draw(leaf):
            spread = 1.0 if leaf.ndim < 2 else leaf.shape[-2] ** -0.5
            values = spread * rng.standard_normal(leaf.shape)
            return jax.device_put(np.asarray(values, leaf.dtype), leaf.sharding)

        def zeros(leaf):
            return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)

        trained, rest = split_trained(self.config, self.abstract.params)
        trained, rest = jax.tree.map(draw, trained), jax.tree.map(zeros, rest)
        step, skipped = (jax.device_put(jnp.int32(0), everywhere(self.mesh)) for _ in range(2))
        with jax.set_mesh(self.mesh):  # as in the trainer
            norm = jax.tree.map(lambda _: step * jnp.nan, self.abstract.gradient_norm)
            params = nnx.merge_state(trained, rest)
            return State(step, params, self.init(trained), skipped, norm)

    def place(self, batch: Batch) -> Any:
        microbatches = self.config.gradient_accumulation_steps
        return place(batch, self.mesh, microbatches=microbatches)

    def run(self, batches, state: State | None = None) -> tuple[State, list]:
        """The last state, and the reports as numbers; `state` is donated."""
        reports = []
        with jax.set_mesh(self.mesh):
            state = self.state() if state is None else state
            for batch in batches:
                state, report = self.program(state, self.place(batch))
                reports.append(jax.device_get(report))
        return state, reports


def norm_of(tree: Any) -> float:
    """The root of the sum of squares, computed on the host: nothing is compiled."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return float(np.sqrt(sum(np.sum(leaf**2) for leaf in leaves)))


def mesh_of(sizes: tuple[int, ...]) -> jax.sharding.Mesh:
    """A mesh over the first devices, of these sizes of data, fsdp, tensor and, if given, expert."""
    config = MeshConfig(**dict(zip(("data", "fsdp", "tensor", "expert"), sizes, strict=False)))
    return make_mesh(config, jax.devices()[: math.prod(sizes)])


def stepper(config: TrainConfig, sizes: tuple[int, ...] = ONE) -> Stepper:
    """The config's step on a mesh of these sizes."""
    return _stepper(config, sizes)


@functools.cache  # for which `sizes` left out would be other arguments than ONE
def _stepper(config: TrainConfig, sizes: tuple[int, ...]) -> Stepper:
    return Stepper(config, mesh_of(sizes))


def random_batches(number: int, config: TrainConfig = SMALL, seed: int = 0) -> list[Batch]:
    """Batches of text that repeats itself, with labels missing here and there."""
    rng = np.random.default_rng(seed)
    rows, length = config.global_batch_size, config.sequence_length
    made = []
    for _ in range(number):
        words = rng.integers(0, config.model.vocab, (rows, 1, 4), np.int32)
        text = np.tile(words, (1, length // 4 + 1, 1)).reshape(rows, -1)
        labels = text[:, 1 : length + 1].copy()
        labels[:3, :10], labels[5] = -100, -100
        made.append(Batch(text[:, :length].copy(), labels))
    return made


def good_and_bad() -> list[Batch]:
    """Two batches; the second has a token outside the vocabulary, and its loss is NaN."""
    good, bad = random_batches(2)
    bad.tokens[0, 0] = 999
    return [good, bad]

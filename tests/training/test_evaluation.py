"""The held-out loss is the mean over labels, of the same batches each time, on any mesh."""

import jax
import numpy as np
import pytest
from flax import nnx
from train_cases import small, stepper

from coat_jax import models
from coat_jax.training.config import EvaluationConfig, MeshConfig
from coat_jax.training.data import load
from coat_jax.training.evaluation import Evaluation
from coat_jax.training.mesh import make_mesh

CONFIG = small(
    model={"layers": 1, "dtype": "float32"},
    optimizer={"name": "adamw"},
    evaluation=EvaluationConfig(every=1, batches=3),
    accumulation=2,
)


@pytest.fixture(scope="module")
def params():
    return stepper(CONFIG).state().params


@pytest.fixture(scope="module")
def graph():
    return models.abstract(CONFIG.model)[0]


def loss_on(sizes, graph, params, config=CONFIG):
    data, fsdp, tensor = sizes
    mesh = make_mesh(
        MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor]
    )
    with jax.set_mesh(mesh):
        evaluation = Evaluation(config, graph, mesh)
        placed = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
        first, again = (evaluation.loss(placed) for _ in range(2))
    assert first == again
    return first


def test_it_is_the_mean_over_the_labels_of_the_first_batches(graph, params):
    data = {"batch": 24, "sequence": 32, "vocab": 256, "epochs": 1}
    batch = next(load(CONFIG.data, split="held_out", **data))  # as one batch of three
    model = nnx.merge(graph, params)
    wanted = model.loss(batch.tokens, batch.labels)
    np.testing.assert_allclose(loss_on((1, 1, 1), graph, params), wanted, rtol=1e-6)


def test_it_does_not_depend_on_seed_or_mesh(graph, params):
    wanted = loss_on((1, 1, 1), graph, params)
    np.testing.assert_allclose(loss_on((2, 4, 1), graph, params), wanted, rtol=1e-6)
    other = small(
        model={"layers": 1, "dtype": "float32"},
        evaluation=CONFIG.evaluation,
        accumulation=2,
        seed=9,
    )
    assert loss_on((1, 1, 1), graph, params, other) == wanted

"""The held-out loss is the mean over labels, of the same batches each time, on any mesh."""

import dataclasses
import json
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from train_cases import ONE, mesh_of, small, stepper

from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.training import held_out
from coat_jax.training.config import EvaluationConfig
from coat_jax.training.data import DataConfig, Loader, rows_of
from coat_jax.training.held_out import Evaluation

CONFIG = small(
    model={"layers": 1, "dtype": "float32"},
    optimizer={"name": "adamw"},
    evaluation=EvaluationConfig(every=1, batches=3),
    gradient_accumulation_steps=2,
)


@pytest.fixture(scope="module")
def params():
    return stepper(CONFIG).state().params


@pytest.fixture(scope="module")
def graph():
    return models.abstract(CONFIG.model)[0]


@partial(jax.jit, static_argnums=0)
def loss_of(graph, params, *arrays):
    """What the model itself says of tokens, labels and so on."""
    return nnx.merge(graph, params).loss(models.Batch(*arrays)).mean


def loss_on(sizes, graph, params, config=CONFIG):
    with jax.set_mesh(mesh := mesh_of(sizes)):
        of_run = Evaluation(config, graph, mesh)
        placed = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
        first, again = (of_run.measure(placed)[0] for _ in range(2))
    assert first == again
    return first


@pytest.mark.parametrize(("sizes", "parts", "seed"), [(ONE, 4, 9), ((2, 4, 1), 2, 0)])
def test_it_is_the_mean_over_the_labels_of_the_first_batches(graph, params, sizes, parts, seed):
    """Whatever the mesh, the number of microbatches and the seed."""
    rows = rows_of(CONFIG.data, split="held_out", sequence=32, vocab=256)
    batch = next(Loader(rows, batch=3 * CONFIG.global_batch_size, seed=0))  # as one batch of three
    wanted = loss_of(graph, params, batch.tokens, batch.labels)
    config = dataclasses.replace(CONFIG, gradient_accumulation_steps=parts, seed=seed)
    np.testing.assert_allclose(loss_on(sizes, graph, params, config), wanted, rtol=1e-6)


def test_it_is_compiled_with_the_options_of_the_run(graph, params, monkeypatch):
    monkeypatch.setattr(held_out, "compiler_options", lambda *_: {"xla_no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        loss_on(ONE, graph, params)


def chat(folder, answers, template="{role}{content}{end}"):
    """A config whose held-out conversations have answers of these lengths, and all its batches."""
    for name, lengths in (("train", [9]), ("held_out", answers)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for length in lengths:
                messages = [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": "x" * length},
                ]
                file.write(json.dumps({"messages": messages}) + "\n")
    paths = {name: (str(folder / f"{name}.jsonl"),) for name in ("train", "held_out")}
    data = DataConfig(**paths, kind="chat", template=template)
    every = EvaluationConfig(every=1, batches=2**31 - 1)
    return dataclasses.replace(CONFIG, data=data, evaluation=every, global_batch_size=2)


def test_labels_count_alike_in_whatever_batch_they_are(graph, params, tmp_path):
    """Batches of 2 to 15 labels: the mean of their means is another number."""
    config = chat(tmp_path, [1, 14, 3])
    rows = rows_of(config.data, split="held_out", sequence=32, vocab=256)
    batches = list(Loader(rows, batch=1, seed=0, epochs=1))
    counts = [int((batch.labels >= 0).sum()) for batch in batches]
    assert sorted(counts) == [2, 4, 15]
    losses = [float(loss_of(graph, params, *batch)) for batch in batches]
    wanted = np.average(losses, weights=counts)
    assert abs(wanted - np.mean(losses)) > 0.01
    np.testing.assert_allclose(loss_on(ONE, graph, params, config), wanted, rtol=1e-5)


def test_batches_without_a_label_are_refused_at_the_start(graph, tmp_path):
    """Their loss would be 0, and the perplexity 1."""
    config = chat(tmp_path, [9], 40 * "." + "{role}{content}" + 40 * "." + "{end}")
    mesh = mesh_of(ONE)
    with jax.set_mesh(mesh), pytest.raises(UserError, match="held_out data has no token to pre"):
        Evaluation(config, graph, mesh)

"""The first state of a run is made in shards, from a seed or from a folder with a model."""

import contextlib
import dataclasses
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_model import SMALL, filled
from steps import assert_equal
from train_cases import mesh_of, small

from coat_jax import models
from coat_jax.training.checkpoint import Checkpoints, weights
from coat_jax.training.cluster.mesh import open_data
from coat_jax.training.config import to_json
from coat_jax.training.setup import prepare, require_same_model

CONFIG = small(model={"layers": 1}, optimizer={"name": "adamw"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as transformers writes it, with weights of its own."""
    path = tmp_path_factory.mktemp("hf")
    models.hf.save(path, models.create(CONFIG.model, seed=5), dtype=jnp.bfloat16)
    return str(path)


def save_run(folder, model):
    extra = {"config": {"model": to_json(model.config)}}
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(0, {"params": nnx.state(model)}, extra, wait=True)


def made(config, sizes=(2, 2, 2)):
    setup = prepare(config, mesh_of(sizes))
    return setup.abstract, setup.new_state()


def test_it_is_what_was_announced_and_random_by_the_seed_and_nothing_large_is_whole():
    abstract, state = made(small(model={"layers": 1}))
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for leaf, announced in zip(*map(jax.tree.leaves, (state, abstract)), strict=True):
        assert (leaf.shape, leaf.dtype) == (announced.shape, announced.dtype)
        assert leaf.sharding.is_equivalent_to(announced.sharding, leaf.ndim)
        if leaf.size >= 64 * 64:
            assert leaf.addressable_shards[0].data.size == leaf.size // 4
    assert int(state.step) == int(state.skipped) == 0
    _, other = made(small(model={"layers": 1}, seed=1))
    assert np.mean(state.params["embed"][...] != other.params["embed"][...]) > 0.5


def test_the_seed_decides_the_order_of_the_data():
    def first_batch(seed):
        config = small(model={"layers": 1}, seed=seed)
        with contextlib.closing(open_data(config, mesh_of((1, 1, 1)), "train")) as data:
            return next(data).tokens

    one, other, again = map(first_batch, (0, 1, 0))
    assert np.mean(one != other) > 0.5
    np.testing.assert_array_equal(one, again)


def test_a_run_begins_from_a_folder_or_where_another_run_ended(folder, tmp_path):
    config = dataclasses.replace(CONFIG, init_from=folder)
    require_same_model(folder, config.model)
    _, state = made(config)
    embed = models.create(CONFIG.model, seed=5).embed[...]
    assert state.params["embed"][...].dtype == jnp.float32
    np.testing.assert_array_equal(state.params["embed"][...], embed.astype(jnp.bfloat16))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.moments))
    save_run(tmp_path / "run", models.hf.load(folder))
    _, again = made(dataclasses.replace(CONFIG, init_from=str(tmp_path / "run")), (1, 1, 1))
    # By names: Flax keeps the axes of a mesh with each parameter, and these may differ.
    again, state = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(one)}
        for one in (again, state)
    )
    assert_equal(again, state)


def test_layers_one_by_one_may_be_stacked_in_the_next_run(tmp_path):
    """Eleven of them: in a checkpoint the names of layers are sorted as text."""
    model = filled(dataclasses.replace(SMALL, layers=11, scan=False))
    save_run(tmp_path, model)
    found = weights.parameters_of(tmp_path, model.config)
    assert [name[1] for name in found if name[-1] == "down"] == list(range(11))
    stacked = weights.load(tmp_path, dataclasses.replace(model.config, scan=True))
    for i in range(11):
        np.testing.assert_array_equal(
            stacked.layers.mlp.down[...][i], model.layers[i].mlp.down[...]
        )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"ffn": 256}, "ffn is 128 there and 256 in the config"),
        ({"layers": 2, "tied": True}, "layers is 1 there and 2 .* tied is False there and True"),
    ],
)
def test_a_folder_with_another_model_is_refused(folder, model, message):
    config = small(model={"layers": 1} | model)
    with pytest.raises(ValueError, match=f"holds another model: .*{message}.*replace") as refused:
        require_same_model(folder, config.model)
    package, name = re.search(r"from (\S+) import (\w+)", str(refused.value)).groups()
    assert getattr(importlib.import_module(package), name).model_config(folder).layers == 1


def test_biases_of_routers_are_parameters_and_their_rate_is_not(tmp_path):
    experts = models.Experts(count=4, chosen=2, bias_rate=0.1)
    save_run(tmp_path, filled(dataclasses.replace(SMALL, experts=experts)))
    faster, without = (
        dataclasses.replace(SMALL, experts=dataclasses.replace(experts, bias_rate=rate))
        for rate in (0.2, 0.0)
    )
    require_same_model(tmp_path, faster)
    with pytest.raises(ValueError, match=r"bias_rate is 0\.1 there and 0\.0 in the config"):
        require_same_model(tmp_path, without)


def test_fields_that_a_run_chooses_may_differ(folder):
    chosen = {"layers": 1, "context": 32, "precision": "coat", "scan": False, "remat": "layer"}
    require_same_model(folder, small(model=chosen).model)

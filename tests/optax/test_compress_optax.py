"""compress takes every optimizer and wrapper of optax and optax.contrib, or says why not.

The table is `experiments.compress_table`; its results are in docs/compressed_optax.md.
"""

import inspect
import json
import math
import warnings

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

from experiments import compress_table as table

# Some of what optax still has it calls deprecated when it is used.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def described(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("group", ["STATELESS", "LINKS", "TRAINED"])
def test_a_step_traces_and_leaves_the_state_as_it_was(group, dtype):
    """In structure, shapes and dtypes: it can be scanned, and be a branch of jax.lax.cond."""
    for name, make in getattr(table, group).items():
        state, after = table.trace(name, make(), dtype)
        assert jax.tree.structure(after) == jax.tree.structure(state), name
        assert described(after) == described(state), name
        assert name not in table.STATELESS or table.compressed_leaves(state) == 0, name


MOMENTS = {"rmsprop": 2, "adafactor": 1, "contrib.prodigy": 3, "lion": 1, "contrib.sophia": 2}


@pytest.mark.costly
@pytest.mark.parametrize("name", MOMENTS)
def test_a_compressed_transformation_trains_as_before(name, monkeypatch):
    """The loss is no more than 6 % higher; it may be lower, as noise has it."""
    monkeypatch.setattr(table, "SEEDS", 1)
    plain, ours = (
        table.wrapped(name, table.TRAINED[name](), compressed=compressed)
        for compressed in (False, True)
    )
    state = jax.eval_shape(ours.init, table.start(jnp.float32))
    assert table.compressed_leaves(state) == MOMENTS[name]
    loss, compressed_loss = (table.train(name, tx, jnp.float32) for tx in (plain, ours))
    assert compressed_loss < 1.06 * loss
    assert loss < 0.4 * table.loss_of(table.start(jnp.float32), table.X, table.Y)


def test_the_table_has_all_of_optax():
    def makes_one(f):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            returned = str(inspect.signature(f).return_annotation)
        return "GradientTransformation" in returned

    names = {
        prefix + name
        for prefix, module in (("", optax), ("contrib.", optax.contrib))
        for name, f in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_") and makes_one(f)
    }
    assert len(names) > 100
    traced = table.TRAINED | table.LINKS | table.STATELESS
    assert names <= {*traced, *table.REFUSED, *table.EXCLUDED}


def test_init_refuses_transformations_that_cannot_be_compressed():
    assert all(table.refusal(make()) for make in table.REFUSED.values())


def test_the_results_are_of_this_table_and_good():
    """No loss is more than 10 % above the uncompressed one's, but those named here."""
    figures = json.loads(table.FILE.read_text())["figures"]
    assert set(figures["trained"]) == set(table.TRAINED)
    assert all(figures["stateless"].values())
    worse = {
        (name, dtype)
        for name, row in figures["trained"].items()
        for dtype in table.DTYPES
        if row[dtype]["loss"] is not None  # diverges by itself
        and not (row[dtype]["compressed_loss"] or math.inf) < 1.1 * row[dtype]["loss"]
    }
    # Sums of all gradients since the first step, from which they compute the parameters anew.
    assert {name for name, _ in worse} <= {"contrib.cocob", "contrib.madgrad"}


COPIES = {
    "contrib.schedule_free_sgd": ".z",
    "contrib.prodigy": ".params0",
    "contrib.mechanize": ".x0",
    "contrib.cocob": ".init_particles",
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_parameters_stay_as_they_are(name):
    """Also where the parameters begin at zero, like the moments, and where `init` is traced."""
    tx = table.wrapped(name, table.TRAINED[name](), compressed=True)
    for scale in (0.0, 1.0):
        params = jax.tree.map(lambda p, scale=scale: scale * p, table.start(jnp.bfloat16))
        for state in (tx.init(params), jax.eval_shape(tx.init, params)):
            copies = [
                leaf
                for path, leaf in jax.tree.leaves_with_path(state.codes)
                if COPIES[name] in jax.tree_util.keystr(path) and leaf.shape == params["up"].shape
            ]
            assert copies
            assert all(leaf.dtype != jnp.float8_e4m3fn for leaf in copies)

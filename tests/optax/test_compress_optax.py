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
TRACED = {**table.TRAINED, **table.LINKS, **table.STATELESS}


def described(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def assert_traces(name, dtype):
    state, after = table.trace(name, TRACED[name](), dtype)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert described(after) == described(state)
    assert name not in table.STATELESS or table.compressed_leaves(state) == 0


@pytest.mark.parametrize("name", TRACED)
def test_a_step_traces_and_leaves_the_state_as_it_was(name):
    """In structure, shapes and dtypes: it can be scanned, and be a branch of jax.lax.cond."""
    assert_traces(name, jnp.bfloat16)


@pytest.mark.costly
@pytest.mark.parametrize("name", TRACED)
def test_a_step_traces_with_fp32_parameters_too(name):
    assert_traces(name, jnp.float32)


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
    assert names <= {*TRACED, *table.REFUSED, *table.EXCLUDED}


@pytest.mark.parametrize("name", table.REFUSED)
def test_init_refuses_transformations_that_cannot_be_compressed(name):
    assert table.refusal(table.REFUSED[name]())


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
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_copies_of_parameters_stay_as_they_are(name, traced, scale):
    """Also where the parameters begin at zero, like the moments, and where `init` is traced."""
    params = jax.tree.map(lambda p: scale * p, table.start(jnp.bfloat16))
    tx = table.wrapped(name, table.TRAINED[name](), compressed=True)
    state = jax.eval_shape(tx.init, params) if traced else tx.init(params)
    copies = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(state.codes)
        if COPIES[name] in jax.tree_util.keystr(path) and leaf.shape == params["up"].shape
    ]
    assert copies
    assert all(leaf.dtype != jnp.float8_e4m3fn for leaf in copies)

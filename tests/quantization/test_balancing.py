"""Laws of balancing: the model stays the same, and columns are as large as what they multiply."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quantization_cases import TOKENS
from small_model import QUICK, SMALL, filled

from coat_jax import nn
from coat_jax import quantization as q
from coat_jax.errors import UserError
from coat_jax.models import lazy_arrays
from coat_jax.nn import MeshAxes
from coat_jax.quantization.balancing import (
    LEAST_EXPONENT,
    MOST_EXPONENT,
    _factors_of_columns,
    _factors_of_keys,
    balance_parameters,
)
from coat_jax.quantization.calibration import observe

CONFIG = dataclasses.replace(SMALL, layers=2, qkv_bias=True, dtype=jnp.float32)


def logits(model):
    graph, state = nnx.split(model)
    compiled = jax.jit(lambda state: nnx.merge(graph, state)(TOKENS[0])).lower(state)
    return np.asarray(compiled.compile(compiler_options=QUICK)(state))


def arrays(model):
    return {path: leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}


def scale_pairs(model, factor=32.0):
    """Makes two pairs of columns of each head of keys larger, and those of queries smaller."""
    config = model.config
    of_head = np.ones(config.head_dim, np.float32)
    of_head[[1, 3, 1 + config.head_dim // 2, 3 + config.head_dim // 2]] = factor
    for layer in [model.layers] if config.scan else model.layers:
        attention = layer.attention
        for name, factors in (("key", of_head), ("query", 1 / of_head)):
            norm = getattr(attention, f"{name}_norm")
            whole = getattr(attention, name) if norm is None else norm.scale
            parameters = (
                [whole] if norm is not None else [whole, getattr(attention, f"{name}_bias")]
            )
            for parameter in filter(None, parameters):
                heads = parameter.shape[-1] // config.head_dim
                scaled = parameter[...] * np.tile(factors, heads)
                parameter[...] = scaled.astype(parameter.dtype)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("changes", "unchanged", "scan"),
    [
        ({"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}, set(), False),
        ({"norms": "after"}, {"gate", "attention_norm", "mlp_norm"}, True),
        ({"norm": "layer", "qkv_bias": False}, {"gate"}, False),
        ({"qk_norm": "head"}, {"key_bias", "query_bias"}, False),
        ({"activation_limit": 0.1}, {"down"}, True),
        ({"norms": "after", "qk_norm": "all"}, {"query", "key", "query_bias"}, True),
        ({}, {"embed", "head"}, True),
    ],
)
def test_it_computes_the_same_numbers(changes, unchanged, scan):
    model = filled(dataclasses.replace(CONFIG, scan=scan, layers=1 + scan, **changes))
    scale_pairs(model)
    balanced = q.balance(model, TOKENS)
    np.testing.assert_array_equal(logits(balanced), logits(model))
    before, after = arrays(model), arrays(balanced)
    changed = {p for p, x in before.items() if not (np.asarray(x) == np.asarray(after[p])).all()}
    assert changed
    names = {str(name) for path in changed for name in path}
    of_keys = {"query", "key"} if "qk_norm" not in changes else {"query_norm", "key_norm"}
    assert {"value", "out", "up", "down"} - unchanged | of_keys <= names
    assert not names & unchanged
    assert all(after[path].dtype == x.dtype for path, x in before.items())


def test_columns_are_as_large_as_the_rows_that_multiply_them():
    """Beside the others: to a factor of 2, since factors are powers of two."""
    kv_heads = CONFIG.heads // 2
    config = dataclasses.replace(CONFIG, scan=False, layers=1, kv_heads=kv_heads)
    model = filled(config)
    rng = np.random.default_rng(1)
    for block in model.layers:
        for norm in (block.attention.norm, block.mlp.norm):
            norm.scale[...] *= outliers(rng, config.width)
        for weight in (block.attention.value, block.mlp.up):
            weight[...] *= outliers(rng, weight.shape[1])

    def spread(model):
        """How much larger a column is than its row, beside the others of its input, at most."""
        ranges = q.calibrate(model, TOKENS, q.Recipe())
        (block,), worst = model.layers, 0
        for names in (("query", "key", "value"), ("out",), ("gate", "up"), ("down",)):
            part = "mlp" if hasattr(block.mlp, names[0]) else "attention"
            weights = [np.abs(getattr(getattr(block, part), name)[...]) for name in names]
            rows = np.max([weight.max(axis=1) for weight in weights], axis=0)
            columns = ranges[f"layers.0.{part}.{names[0]}"].columns
            if names == ("out",):  # heads of queries share what is divided
                shape = kv_heads, -1, config.head_dim
                rows, columns = (x.reshape(shape).max(axis=1) for x in (rows, columns))
            ratios = columns / rows
            worst = max(worst, np.max(ratios / np.median(ratios)))
        return worst

    assert spread(model) > 100
    assert spread(q.balance(model, TOKENS)) < 4.1  # the median is off by 2, too


def outliers(rng, size):
    return np.where(rng.random(size) < 0.1, 100.0, 1.0).astype(np.float32)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": "head"}, {"qk_norm": "all"}])
def test_keys_in_int4_are_less_wrong(changes):
    """With outliers in some columns, attention's error is half as large or less.

    Queries are so large that the keys decide which token's value is the result.
    """
    config = dataclasses.replace(CONFIG, scan=False, layers=1, head_dim=32, **changes)
    model = filled(config)
    scale_pairs(model)
    attention = model.layers[0].attention
    sharp = (
        (attention.query, attention.query_bias)
        if attention.query_norm is None
        else [attention.query_norm.scale]
    )
    for parameter in sharp:
        parameter[...] *= 128

    def error(model):
        attention = model.layers[0].attention
        x = model.embed_tokens(TOKENS[0])
        length = x.shape[1] - 1
        results = []
        for cache in ("int4", None):
            _, past = attention.prefill(x[:, :-1], cache=cache)
            past = jax.tree.map(lambda of_layer: of_layer[None], past)
            positions, first = jnp.full((len(x), 1), length), jnp.zeros(len(x), jnp.int32)
            visible = nn.Visible(past, 0, first, length)
            results.append(attention.decode(x[:, -1:], positions, visible)[0] - x[:, -1:])
        got, wanted = results
        return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)

    before, after = error(model), error(q.balance(model, TOKENS))
    assert after <= before / 2


def test_factors_of_keys_are_those_of_pairs_around_a_typical_one():
    pairs = np.float32([[1, 2, 64, 2], [3, 0, 3, 1e-9]])
    config = dataclasses.replace(CONFIG, heads=4, kv_heads=2, head_dim=8, qkv_bias=False)
    s = np.array([[0.5, 1, 32, 1], [1, 1, 1, 0.25]])
    columns = np.concatenate([s, s], axis=1)
    found = _factors_of_keys(config, pairs)
    np.testing.assert_array_equal(found["attention.key"][0], 1 / columns.reshape(1, 16))
    of_queries = np.repeat(columns, 2, axis=0).reshape(1, 32)
    np.testing.assert_array_equal(found["attention.query"][0], of_queries)
    one = _factors_of_keys(dataclasses.replace(config, qk_norm="head"), pairs)
    assert {name: each[0].shape for name, each in one.items()} == {
        "attention.key_norm.scale": (8,),
        "attention.query_norm.scale": (8,),
    }


def test_factors_are_powers_of_two_in_a_range():
    columns = np.array([1.0, 1.0, 1.0, 1.0, 100.0, 1e30, 0.0, 1.0, 1.0, 1e-6], np.float32)
    rows = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1e-30, 1.0, 0.0, 2.0**-4, 1.0], np.float32)
    expected = [1, 1, 1, 1, 8, 2**MOST_EXPONENT, 1, 1, 4, 2**LEAST_EXPONENT]
    np.testing.assert_array_equal(_factors_of_columns(columns, rows), expected)
    np.testing.assert_array_equal(_factors_of_columns(columns * 2, rows / 2), expected)
    np.testing.assert_array_equal(_factors_of_columns(0 * columns, rows), np.ones(10))


def test_it_does_not_depend_on_the_mesh():
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    config = dataclasses.replace(CONFIG, axes=MeshAxes("fsdp", "tensor"))
    with jax.set_mesh(mesh):
        model = filled(config, mesh=mesh)
        balanced = q.balance(model, TOKENS)
    alone = arrays(q.balance(filled(CONFIG), TOKENS))
    for path, x in arrays(balanced).items():
        np.testing.assert_array_equal(x, alone[path])
        assert x.sharding.is_equivalent_to(arrays(model)[path].sharding, x.ndim), path


@pytest.mark.parametrize("scan", [True, False])
def test_parameters_that_are_read_in_parts_are_balanced_alike(scan):
    model = filled(CONFIG)
    parameters = lazy_arrays.arrange(lazy_arrays.parameters_of(model), scan=scan)
    found = balance_parameters(CONFIG, parameters, observe(model, TOKENS))
    wanted = lazy_arrays.arrange(lazy_arrays.parameters_of(q.balance(model, TOKENS)), scan=scan)
    for path, one in found.items():
        parts = one._replace(piece=tuple(-(-n // 2) for n in one.shape))
        for index in lazy_arrays.pieces(parts):
            np.testing.assert_array_equal(one.read(index), wanted[path].read(index))


def test_what_cannot_be_balanced_is_refused():
    with pytest.raises(TypeError, match="Llama, not RMSNorm"):
        q.balance(nn.RMSNorm(4), TOKENS)
    config = dataclasses.replace(CONFIG, layers=1)
    unread = iter(TOKENS)
    with pytest.raises(UserError, match="in float16 cannot be balanced"):
        q.balance(filled(dataclasses.replace(config, param_dtype=jnp.float16)), unread)
    assert len(list(unread)) == len(TOKENS)
    model = filled(config)
    damaged = filled(dataclasses.replace(config, scan=False))
    damaged.layers[0].mlp.norm.scale[...] = jnp.full(CONFIG.width, jnp.nan)
    with pytest.raises(UserError, match=r"inputs of layers.0.mlp.gate are not finite"):
        q.balance(damaged, TOKENS)
    with pytest.raises(UserError, match="calibration text is empty"):
        q.balance(model, [])
    with pytest.raises(UserError, match="already quantized"):
        q.balance(q.quantize(model, q.Recipe()), TOKENS)

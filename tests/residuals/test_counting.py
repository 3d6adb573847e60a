"""`coat.saved_bytes`: what a function saves, by name, also where XLA counts it."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.residuals.counting import OTHERWISE

X = jax.ShapeDtypeStruct((8, 32), jnp.bfloat16)
WEIGHTS = jax.ShapeDtypeStruct((4, 32, 64), jnp.bfloat16)
CODES, ROWS = 4 * 8 * 64, 4 * 8


def layer(x, w):
    gate = coat.save_fp8(jnp.tanh(x @ w), "gate")
    up = coat.save_fp8(jnp.sin(gate), "up", dtype=jnp.int8)
    return x + (gate * coat.save_fp8(jnp.cos(up), "rest")) @ w.T


def loss_with(policy):
    one = jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def loss(weights, x):
        y, _ = jax.lax.scan(lambda x, w: (one(x, w), None), x, weights)
        return jnp.sum(y.astype(jnp.float32))

    return loss


@pytest.mark.parametrize("offload", [False, True])
def test_it_counts_named_arrays_of_all_iterations_and_others_by_dtype(offload):
    policy = coat.policies.save_fp8("gate", "up", offload=offload)
    found = coat.saved_bytes(loss_with(policy), WEIGHTS, X)
    own = 2 * CODES
    assert found == (
        ("gate", "float8_e4m3fn", 4, CODES + CODES // 16, own),
        ("up", "int8", 4, CODES + 4 * ROWS, own),
        ("rest", OTHERWISE, 4, 0, own),
        ("", "bfloat16", 1, 4 * 8 * 32 * 2, 4 * 8 * 32 * 2),
    )
    assert found.total == 2 * CODES + CODES // 16 + 4 * ROWS + 4 * 8 * 32 * 2
    header, first, *_ = str(found).splitlines()
    assert " ".join(header.split()) == "name saved in arrays bytes in its own dtype"
    assert first.split() == ["gate", "float8_e4m3fn", "4", "2,176", "4,096"]


def test_without_a_policy_nothing_named_is_saved_in_8_bits():
    found = coat.saved_bytes(loss_with(None), WEIGHTS, X)
    assert [s.name for s in found if s.dtype == OTHERWISE] == ["gate", "up", "rest"]
    assert [s.name for s in found if s.dtype != OTHERWISE] == [""]


def plain_llama_layer(w, x):
    """As anybody would write it; what COAT saves has a name."""

    def norm(x, scale):
        y = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
        return (y * inverse).astype(x.dtype) * scale

    x = coat.save_fp8(x, "attention_input")
    n = norm(x, w["attention_norm"])
    heads = (checkpoint_name((n @ w[name]).reshape(*x.shape[:2], -1, 128), name) for name in "qkv")
    o = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
    x = coat.save_fp8(x + checkpoint_name(o, "o") @ w["out"], "mlp_input")
    n = norm(x, w["mlp_norm"])
    gate, up = (coat.save_fp8(n @ w[name], name) for name in ("gate", "up"))
    return x + (jax.nn.silu(gate) * up) @ w["down"]


def test_a_layer_in_plain_jax_saves_what_coats_layers_save():
    width, hidden = 4096, 11008
    shapes = dict.fromkeys(["q", "k", "v", "out"], (width, width))
    shapes |= dict.fromkeys(["gate", "up"], (width, hidden)) | {"down": (hidden, width)}
    shapes |= dict.fromkeys(["attention_norm", "mlp_norm"], (width,))
    w = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((8, 2048, width), jnp.bfloat16)
    unrounded = jax.checkpoint_policies.save_only_these_names("q", "k", "v", "o")
    names = "attention_input", "mlp_input", "gate", "up"
    policy = coat.policies.save_fp8(*names, otherwise=unrounded)
    found = coat.saved_bytes(jax.checkpoint(plain_llama_layer, policy=policy), w, x)
    assert {saved.name for saved in found} == {*names, ""}
    assert found.total / (2 * x.size) == pytest.approx(7.92, abs=0.01)


def test_a_name_that_no_array_has_is_refused():
    said = "names 'gat', but no .* has this name: those there have 'gate', 'up', 'rest'"
    with pytest.raises(UserError, match=said):
        coat.saved_bytes(loss_with(coat.policies.save_fp8("up", "gat")), WEIGHTS, X)

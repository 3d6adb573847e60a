"""On a mesh each device attends from its own texts, with its own heads.

The kernel does not run here: in its place stands a function that computes from the same arrays.
"""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_to_past_laws import draw
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import ops
from coat_jax.kernels import attention_to_past, dispatch, sharding
from coat_jax.numerics.cache_formats import StoredHeads, decode_heads


def launch(kernel, q, *inputs, outputs, programs, warps, stages, SPEC):
    """All slots and the new token in the first part; in the others, nothing is visible."""
    del kernel, warps, stages
    *stored, layer, first, filled = inputs
    batch, heads, group, _ = q.shape
    assert (SPEC.samples, SPEC.heads, SPEC.group) == (batch * heads, heads, group)
    assert programs == SPEC.samples * SPEC.parts == outputs[1].size // group
    n = 1 + SPEC.scaled + SPEC.packed
    kinds = [StoredHeads(*stored[i : i + n]) for i in (0, 3, 6, 9)]
    k, v, own_k, own_v = (decode_heads(x, jnp.float32) for x in kinds)
    k, v = (jnp.concatenate(x, 2) for x in ((k[layer], own_k), (v[layer], own_v)))
    slots = jnp.arange(SPEC.slots + 1)
    seen = (slots >= first[:, None]) & (slots < filled) | (slots == SPEC.slots)
    x = jnp.einsum("bkgh,bkth->bkgt", q, k) * SPEC.factor / attention_to_past.LOG2_E
    x = jnp.where(seen[:, None, None], x, -jnp.inf)
    o = jnp.einsum("bkgt,bkth->bkgh", jax.nn.softmax(x), v)
    log_sums = jax.nn.logsumexp(x, axis=-1) * attention_to_past.LOG2_E
    return [
        jnp.zeros(outputs[0].shape).at[:, :, 0].set(o),
        jnp.full(outputs[1].shape, -1e30).at[:, :, 0].set(log_sums),
    ]


@pytest.mark.parametrize("spec", [P("data", "tensor"), P(("data", "tensor")), P(None, "data")])
@pytest.mark.parametrize("format", [None, "fp8", "int4"])
def test_results_do_not_depend_on_the_mesh(monkeypatch, format, spec):
    monkeypatch.setattr(sharding, "launch", launch)
    monkeypatch.setattr(dispatch, "triton_installed", lambda: True)
    stands_in = SimpleNamespace(attend_to_past=None)
    monkeypatch.setitem(sys.modules, "coat_jax.kernels.triton.attention_to_past", stands_in)
    q, past, new = draw(8, 100, 4, 2, 64, format)
    first, filled = jnp.arange(8) * 10, jnp.int32(90)

    def attend(implementation):
        return lambda q, past, new, first: ops.attention_to_past(
            q, new, ops.Visible(past, 1, first, filled), implementation=implementation
        )

    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    batch, heads = (*spec, None)[:2]

    def place(tree, *axes):
        return jax.device_put(tree, NamedSharding(mesh, P(*axes)))

    arrays = (
        place(q, batch, None, heads),
        place(past, None, batch, heads),
        place(new, batch, heads),
        place(first, batch),
    )
    with jax.set_mesh(mesh):
        got = jax.jit(attend("triton"))(*arrays)
    assert got.sharding.is_equivalent_to(arrays[0].sharding, 4)
    wanted = attend("xla")(q, past, new, first)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)

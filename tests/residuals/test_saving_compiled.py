"""What `coat.save_fp8` saves in programs compiled for Hopper, beside JAX's own policies."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hopper import COMPILED
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from experiments.hopper import compile_for, hopper_mesh, there

pytestmark = COMPILED

TOKENS, WIDTH, HIDDEN = 8192, 2048, 5632
NAMES = "gate", "up"
NAMED = 2 * len(NAMES) * TOKENS * HIDDEN  # bytes of a layer's named arrays in BF16
WHOLE = P()
SAVE = jax.checkpoint_policies.save_only_these_names(*NAMES)
OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=list(NAMES),
    offload_src="device",
    offload_dst="pinned_host",
)


def block(x, w, name):
    gate, up = name(x @ w["gate"], "gate"), name(x @ w["up"], "up")
    return x + (jax.nn.silu(gate) * up) @ w["down"]


@functools.cache
def compiled(layers, policy, name, *, gpus=1, rows=WHOLE, columns=WHOLE):
    """The gradient of a scan over layers, some of whose arrays a checkpoint saves."""
    one = jax.checkpoint(functools.partial(block, name=name), policy=policy, prevent_cse=False)

    def loss(weights, x):
        y, _ = jax.lax.scan(lambda x, w: (one(x, w), None), x, weights)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    with there():
        mesh = hopper_mesh((gpus,), ("x",))

        def array(shape, spec):
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

        wide = array((layers, WIDTH, HIDDEN), P(None, None, *columns))
        narrow = array((layers, HIDDEN, WIDTH), P(None, *columns))
        weights = {"gate": wide, "up": wide, "down": narrow}
        return compile_for(mesh, jax.grad(loss), weights, array((TOKENS, WIDTH), rows))


def bytes_of_a_layer(policy, name):
    """On the device and on the host."""
    shallow, deep = (compiled(depth, policy, name).memory_analysis() for depth in (4, 8))
    return [
        (getattr(deep, kind) - getattr(shallow, kind)) / 4
        for kind in ("temp_size_in_bytes", "host_temp_size_in_bytes")
    ]


def test_named_arrays_take_half_their_bytes_and_nothing_else_grows():
    recomputed, _ = bytes_of_a_layer(None, checkpoint_name)
    in_bf16, _ = bytes_of_a_layer(SAVE, checkpoint_name)
    in_fp8, host = bytes_of_a_layer(coat.policies.save_fp8(*NAMES), coat.save_fp8)
    assert in_bf16 - recomputed == pytest.approx(NAMED, rel=0.01)
    assert in_fp8 - recomputed <= 0.54 * NAMED
    assert host == 0
    peaks = [
        compiled(8, *how).memory_analysis().peak_memory_in_bytes
        for how in ((SAVE, checkpoint_name), (coat.policies.save_fp8(*NAMES), coat.save_fp8))
    ]
    assert peaks[0] - peaks[1] >= 8 * 0.45 * NAMED


def test_offloaded_codes_take_half_the_bytes_of_the_host():
    _, in_bf16 = bytes_of_a_layer(OFFLOAD, checkpoint_name)
    policy = coat.policies.save_fp8(*NAMES, offload=True)
    on_device, in_fp8 = bytes_of_a_layer(policy, coat.save_fp8)
    assert in_bf16 == NAMED
    assert in_fp8 <= 0.54 * NAMED
    assert on_device <= bytes_of_a_layer(None, checkpoint_name)[0] + 0.01 * NAMED


@pytest.mark.parametrize(
    ("rows", "columns"), [(P("x"), P()), (P(), P("x"))], ids=["rows", "columns"]
)
def test_each_device_encodes_its_own_shard(rows, columns):
    policy = coat.policies.save_fp8(*NAMES)
    program = compiled(2, policy, coat.save_fp8, gpus=4, rows=rows, columns=columns).as_text()
    rows, columns = (4 if spec else 1 for spec in (rows, columns))
    assert f"f8e4m3fn[2,{TOKENS // rows},{HIDDEN // columns}]" in program
    assert "all-gather" not in program

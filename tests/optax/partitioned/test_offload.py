"""An optimizer whose state is in host memory gives the numbers of one whose state is not."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import assert_equal, normal

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.optax import Stage, fp8_adamw, in_host_memory, in_place
from coat_jax.optax.partitioned import offload
from coat_jax.optax.states import host_memory
from coat_jax.telemetry.moments import moment_sums

OPTIMIZERS = {
    "fused": lambda: in_place(fp8_adamw(1e-2, weight_decay=0.1)),
    "rounded": lambda: in_place(fp8_adamw(1e-2), round_params="stochastic"),
    "corrected": lambda: in_place(fp8_adamw(1e-2), round_params="24_bits"),
    "one moment": lambda: in_place(coat.optax.compress(optax.lion(1e-2))),
}
# Of two shapes only: what runs without jit is compiled for each.
SHAPES = {"a": (256, 256), "b": {"small": (100,), "w": (256, 256)}, "c": (256, 256)}


@pytest.fixture(autouse=True)
def a_part_is_one_parameter(monkeypatch):
    monkeypatch.setattr(offload, "PART", 1)


def tree(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: normal(rng, shape, dtype), SHAPES, is_leaf=is_shape)


def kinds(state):
    return jax.tree.map(lambda leaf: leaf.sharding.memory_kind, state)


@pytest.mark.costly
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_the_same_bit_for_bit(name):
    """Without jit: XLA may contract a * b + c in one program, and not in another."""
    results = []
    dtype = jnp.float32 if name == "fused" else jnp.bfloat16
    for optimizer in (OPTIMIZERS[name](), in_host_memory(OPTIMIZERS[name]())):
        params = tree(0, dtype)
        state = optimizer.init(params)
        for skip in (False, jnp.array(True), jnp.array(False)):
            params, state = optimizer.step(params, tree(1), state, grad_scale=0.5, skip=skip)
        results.append((params, state))
    assert_equal(*results)


def test_large_arrays_stay_in_host_memory_and_a_compiled_step_rounds_alike():
    """Codes are equal bit for bit; other numbers to the contraction of a * b + c."""
    plain, hosted = OPTIMIZERS["fused"](), in_host_memory(OPTIMIZERS["fused"]())
    wanted, of_plain = jax.jit(plain.step)(tree(0), tree(1), plain.init(tree(0)))
    params = tree(0)
    state = hosted.init(params)
    step = jax.jit(hosted.step, donate_argnums=(0, 2))
    for number in range(2):
        for moment in kinds(state.mu), kinds(state.nu):
            assert moment.codes["a"] == moment.codes["b"]["w"] == "pinned_host"
            on_device = moment.amax["a"], moment.exponent_x16["a"], moment.codes["b"]["small"]
            assert set(on_device) == {"device"}
        if not number:
            params, state = step(params, tree(1), state)
            assert_equal(state.mu.codes, of_plain.mu.codes)
            for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    assert set(jax.tree.leaves(kinds(params))) == {"device"}


def test_moments_in_host_memory_have_the_same_statistics(monkeypatch):
    """They are copied to the device first: not all devices compute with host memory."""
    summed = []
    # The module; in the package its name is that of the function.
    module = sys.modules[moment_sums.__module__]
    monkeypatch.setattr(module, "moment_sums", lambda s: summed.append(s) or moment_sums(s))
    optimizers = OPTIMIZERS["fused"](), in_host_memory(OPTIMIZERS["fused"]())
    found, hosted = (coat.telemetry.moments(one.init(tree(0))) for one in optimizers)
    assert hosted == found != {}
    spaces = {jax.typeof(leaf).memory_space for leaf in jax.tree.leaves(summed)}
    assert spaces == {jax.memory.Space.Device}


def test_a_state_on_the_device_is_stepped_by_the_same_program():
    plain, hosted = OPTIMIZERS["fused"](), in_host_memory(OPTIMIZERS["fused"]())
    params = tree(0)
    state = plain.init(params)
    texts = [jax.jit(one.step).lower(params, tree(1), state).as_text() for one in (plain, hosted)]
    assert texts[0] == texts[1]


STAGES = [
    Stage(lambda params: params["a"], lambda w, _: jnp.ones((4, 256)) @ w / 16),
    Stage(lambda params: params["b"], lambda b, x: jnp.tanh(x @ b["w"])),
    Stage(lambda params: params["c"], lambda w, x: jnp.mean(jnp.square(x @ w))),
]


def test_stages_are_moved_one_by_one():
    results = []
    for optimizer in (OPTIMIZERS["fused"](), in_host_memory(OPTIMIZERS["fused"]())):
        params = {**tree(0), "b": {"w": tree(0)["b"]["w"]}}
        state = optimizer.init(params)

        def step(params, state, optimizer=optimizer):
            return coat.optax.step_by_stages(optimizer, STAGES, params, state)

        step = jax.jit(step)
        for _ in range(2):
            done = step(params, state)
            params, state = done.params, done.state
        assert (kinds(state).mu.codes["a"] == "pinned_host") == (len(results) == 1)
        results.append((done.loss, params, state))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-5, atol=1e-8
        )


def test_each_device_has_its_shard_in_host_memory():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("x"))
    params = {name: jax.device_put(tree(0)[name], rows) for name in ("a", "c")}
    grads = {name: jax.device_put(tree(1)[name], rows) for name in params}
    results = []
    for optimizer in (OPTIMIZERS["fused"](), in_host_memory(OPTIMIZERS["fused"]())):
        shardings = coat.optax.state_shardings(optimizer, params)
        state = jax.jit(optimizer.init, out_shardings=shardings)(params)
        with jax.set_mesh(mesh):
            step = jax.jit(optimizer.step, out_shardings=(None, shardings), donate_argnums=2)
            results.append(step(params, grads, state))
    (_, plain), (_, hosted) = results
    codes = hosted.mu.codes["a"]
    assert codes.sharding == host_memory.host_sharding(rows)
    assert codes.addressable_shards[0].data.shape == (64, 256)
    assert_equal(hosted.mu.codes, plain.mu.codes)


def test_a_checkpoint_is_written_from_copies_and_restored_where_it_is_asked_for(tmp_path):
    """What is in host memory is read by NumPy without a copy, and then cannot be overwritten."""
    plain = OPTIMIZERS["fused"]().init(tree(0))
    state = in_host_memory(OPTIMIZERS["fused"]()).init(tree(0))
    for written, like in ((plain, state), (state, plain)):
        path = tmp_path / str(like is plain)
        coat.optax.save_state(path, written)
        found = coat.optax.restore_state(path, like)
        assert_equal(found, written)
        assert kinds(found) == kinds(like)
    copies = host_memory.copy_hosted(state)
    assert_equal(copies, state)
    assert kinds(copies) == kinds(state)
    codes, copied = state.mu.codes["a"], copies.mu.codes["a"]
    assert codes.unsafe_buffer_pointer() != copied.unsafe_buffer_pointer()
    assert copies.mu.amax["a"] is state.mu.amax["a"]


def test_corrected_params_and_compressed_moments_are_read_from_host_memory():
    """Also moments that are not compressed, such as the second ones here."""
    tx = coat.optax.compress(optax.adam(1e-2), where=lambda path, _: ".mu" in path)
    for optimizer, read, dtype in (
        (OPTIMIZERS["corrected"](), coat.optax.corrected_params, jnp.bfloat16),
        (in_place(tx), lambda _, state: coat.optax.decompress(state), jnp.float32),
    ):
        found = []
        for one in (optimizer, in_host_memory(optimizer)):
            params, state = one.step(tree(0, dtype), tree(1), one.init(tree(0, dtype)))
            found += [read(params, state), jax.jit(read)(params, state)]
        assert "pinned_host" in jax.tree.leaves(kinds(state))
        assert set(jax.tree.leaves(kinds(found[2:]))) == {"device"}
        assert_equal(found[2:], found[:2])


def test_what_cannot_be_stepped_in_parts_is_refused(monkeypatch):
    plain, hosted = OPTIMIZERS["fused"](), in_host_memory(OPTIMIZERS["fused"]())
    params = tree(0)
    state = jax.device_put(plain.init(params), jax.memory.Space.Host)
    with pytest.raises(UserError, match=r"state\.count of shape \(\) is in host .*init\(params\)"):
        hosted.step(params, tree(1), state)
    with pytest.raises(UserError, match=r"state\.count of shape \(\) is in host .*init\(params\)"):
        coat.optax.step_by_stages(hosted, STAGES, params, state)
    with pytest.raises(ValueError, match=r"is missing. The gradients must have"):
        hosted.step(params, {"a": tree(1)["a"]}, hosted.init(params))
    # Whatever their size: `in_place` takes them, and a small state would be on the device.
    lookahead = optax.lookahead(optax.sgd(1e-2), sync_period=5, slow_step_size=0.5)
    with pytest.raises(UserError, match=r"optax.lookahead.*without in_host_memory"):
        in_host_memory(in_place(lookahead)).init(
            optax.LookaheadParams.init_synced({"w": jnp.ones(3)})
        )
    monkeypatch.setattr(host_memory, "KIND", "no_such_memory")
    with pytest.raises(UserError, match=r"cannot reach the memory of their host.*--optimizer"):
        hosted.init(params)

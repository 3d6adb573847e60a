"""The memory that creating a model takes. `test_llama` tests the values of the parameters."""

import jax
import pytest
from flax import nnx

from coat_jax import models


@pytest.fixture
def live_bytes(monkeypatch):
    """The bytes of all new arrays, each time that a stacked array has just been unstacked."""
    before, found, jit = sum(x.nbytes for x in jax.live_arrays()), [], jax.jit

    def watched(function, **options):
        program = jit(function, **options)
        if function is not list:
            return program

        def unstack(array):
            layers = program(array)
            found.append(sum(x.nbytes for x in jax.live_arrays()) - before)
            return layers

        return unstack

    monkeypatch.setattr(jax, "jit", watched)
    return found


def test_only_one_array_is_there_twice_while_layers_are_unstacked(live_bytes):
    config = models.Config(
        vocab=64, width=96, layers=3, heads=2, kv_heads=2, head_dim=48, ffn=160, context=16,
        scan=False,
    )  # fmt: skip
    params = nnx.state(models.create(config))
    sizes = {path: leaf[...].nbytes for path, leaf in nnx.to_flat_state(params)}
    largest = config.layers * max(size for path, size in sizes.items() if path[0] == "layers")
    of_a_layer = [path for path in sizes if path[:2] == ("layers", 0)]
    assert len(live_bytes) == len(of_a_layer) > 5
    assert max(live_bytes) <= sum(sizes.values()) + largest + 1024  # of keys and counters

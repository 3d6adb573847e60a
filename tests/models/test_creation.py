"""The memory that creating a model takes; test_llama has the values."""

import jax
import pytest
from flax import nnx

from coat_jax import models
from coat_jax.models import creation


@pytest.fixture
def unstacked(monkeypatch):
    """The bytes of each stacked array, and those of all arrays once its layers are there, too."""
    before, found, jit = sum(x.nbytes for x in jax.live_arrays()), [], jax.jit

    def watched(function, **options):
        program = jit(function, **options)
        if function is not list:
            return program

        def unstack(array):
            layers = program(array)
            found.append((array.nbytes, sum(x.nbytes for x in jax.live_arrays()) - before))
            return layers

        return unstack

    monkeypatch.setattr(jax, "jit", watched)
    creation._initializer.cache_clear()  # programs that were made before are not watched
    yield found
    creation._initializer.cache_clear()


def test_only_one_array_is_there_twice_while_layers_are_unstacked(unstacked):
    config = models.Config(
        vocab=64, width=96, layers=3, heads=2, kv_heads=2, head_dim=48, ffn=160, context=16,
        scan=False,
    )  # fmt: skip
    params = nnx.state(models.create(config))
    sizes = {path: leaf[...].nbytes for path, leaf in nnx.to_flat_state(params)}
    of_a_layer = [size for path, size in sizes.items() if path[:2] == ("layers", 0)]
    # The largest first: later ones fit where it was.
    expected = sorted((config.layers * size for size in of_a_layer), reverse=True)
    assert [array for array, _ in unstacked] == expected
    # 1024 bytes for keys and counters.
    assert max(live for _, live in unstacked) <= sum(sizes.values()) + expected[0] + 1024

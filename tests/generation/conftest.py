"""Programs of these tests run once or twice: they are compiled quickly rather than well."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

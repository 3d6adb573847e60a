"""Whether JAX finds a device to run on."""

import os


def why_none() -> str | None:
    """Why JAX finds no device; None if it finds one.

    The platforms in JAX_PLATFORMS may be misspelt, or need a plugin that is not installed, or that
    does not start.
    """
    import jax

    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # the former without words, for CUDA's plugin
        said = " ".join(str(error).split())
        asked = os.environ.get("JAX_PLATFORMS")
        return said or f"JAX_PLATFORMS is {asked!r}, and no plugin for it starts."
    return None

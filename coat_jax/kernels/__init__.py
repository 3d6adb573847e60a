"""The heavy arithmetic: `jnp` references, and the functions that launch Triton kernels."""

"""The heavy arithmetic: one concept per file, the `jnp` reference above its Triton kernel."""

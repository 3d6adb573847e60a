"""The heavy arithmetic: one file per concept, each with a `jnp` reference above its Triton kernel."""

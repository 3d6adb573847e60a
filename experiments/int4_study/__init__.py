"""What weights and caches in INT4 cost a trained network.

`ways` lists what is compared. `fireq` and `caches` are what `coat_jax` does not have, `quantizing`
makes one run, `increases` finds the costs, and `study` and `picture` show them.
"""

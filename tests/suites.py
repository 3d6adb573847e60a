"""Suites of their own: tests are chosen for them by a mark, and modules by their names."""

# The marks. A module with such tests has the word in it.
SUITES = ("compiled", "examples", "gpu", "interpret", "oracle", "several_gpus")
# Modules whose names end so have only tests of that suite; test_suites.py sees to it.
ENDINGS = {"compiled": "compiled", "gpu": "gpu", "interpret": "interpret", "oracles": "oracle"}
# The libraries that such modules need.
NEEDED = {"interpret": "triton", "oracles": "torch"}

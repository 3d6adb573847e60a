"""`python -m coat_jax`: the same as `coat`."""

import sys

from coat_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())

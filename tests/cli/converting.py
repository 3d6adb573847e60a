"""Converts a model in a process of its own: `converting.py FOLDER there_and_back` or `to_int8`.

Prints by how many bytes the process grew at most, after a small model was converted first. Pieces
are of 1 MiB instead of 64, so that the model need not be large either.
"""

import resource
import sys
from pathlib import Path

from coat_jax.models import lazy_arrays
from coat_jax.quantization import Recipe
from coat_jax.training.checkpoint import conversion

lazy_arrays.PIECE = 1 << 20


def there_and_back(folder):
    conversion.convert(folder / "theirs", folder / "ours")
    conversion.convert(folder / "ours", folder / "again", file_bytes=20_000_000)


def to_int8(folder):
    recipe = Recipe(format="int8", fit="max")
    conversion.convert(folder / "theirs", folder / "small", recipe)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    tiny, large = (Path(sys.argv[1]) / name for name in ("tiny", "large"))
    convert = {"there_and_back": there_and_back, "to_int8": to_int8}[sys.argv[2]]
    convert(tiny)
    before = peak()
    convert(large)
    print(peak() - before)

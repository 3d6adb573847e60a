"""Converts a model in a process of its own: `converting.py FOLDER [FORMAT]`.

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


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    folder, *to = sys.argv[1:]
    recipe = Recipe(format=to[0], fit="max") if to else None
    for name in ("tiny", "large"):
        before, model = peak(), Path(folder) / name
        conversion.convert(model / "theirs", model / "new", recipe, file_bytes=20_000_000)
    print(peak() - before)

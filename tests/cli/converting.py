"""Converts a model there and back in a process of its own: `converting.py FOLDER`.

Prints by how many bytes the process grew at most, after a tiny model was converted first. Pieces
are of 1 MiB instead of 64, so that the model need not be large either.
"""

import resource
import sys
from pathlib import Path

from coat_jax.models import stored
from coat_jax.training.checkpoint import conversion

stored.PIECE = 1 << 20


def there_and_back(folder):
    conversion.to_run(folder / "theirs", folder / "ours")
    conversion.to_hugging_face(folder / "ours", folder / "again", file_bytes=20_000_000)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    tiny, large = (Path(sys.argv[1]) / name for name in ("tiny", "large"))
    there_and_back(tiny)
    before = peak()
    there_and_back(large)
    print(peak() - before)

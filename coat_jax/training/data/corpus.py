"""The built-in corpus: the source of Python's own standard library, as bytes.

It is on every machine that runs these programs, it is text with structure at every scale, and
it needs neither a download nor a tokenizer: a token is a byte, the vocabulary has 256 entries.
Another release of Python has another corpus.

Whole files are held out, every 20th, so that the held-out loss is over text that was not seen.
"""

import functools
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

HELD_OUT = 20  # every n-th file is held out
# Tests, what others installed, and the record of how this Python was built.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
BUILD = "_sysconfigdata"


class Corpus(NamedTuple):
    """The bytes to train on and those to evaluate on, from different files."""

    train: UInt8[np.ndarray, " N"]
    held_out: UInt8[np.ndarray, " M"]


@functools.cache  # a run loads the training part first, and the held-out part later
def load() -> Corpus:
    """Reads the corpus."""
    texts = (b"".join(path.read_bytes() for path in files) for files in files_of())
    return Corpus(*(np.frombuffer(text, np.uint8) for text in texts))


def files_of() -> tuple[list[Path], list[Path]]:
    """Returns the files to train on and those to evaluate on."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED & set(path.relative_to(root).parts) and not path.name.startswith(BUILD)
    ]
    held_out = files[HELD_OUT - 1 :: HELD_OUT]
    return sorted(set(files) - set(held_out)), held_out

"""Data for training: token files, text, conversations, and the built-in corpus, as batches.

    loader = load(DataConfig(train=("tokens/*.npy",)), split="train", batch=8, sequence=1024, ...)
    batch = next(loader)        # tokens, labels, positions, segments: [8, 1024] each

Nothing is downloaded, nothing in the data is executed. Left out: mixing sources with weights.
"""

from coat_jax.training.data.config import DataConfig as DataConfig
from coat_jax.training.data.loader import Loader as Loader
from coat_jax.training.data.rows import Batch as Batch
from coat_jax.training.data.sources import load as load

"""Data for training: token files, text, conversations, and the built-in corpus, as batches.

    loader = load(DataConfig(train=("tokens/*.npy",)), split="train", batch=8, sequence=1024, ...)
    batch = next(loader)        # a `Batch` of arrays [8, 1024]

Nothing is downloaded, nothing in the data is executed. Left out: mixing sources with weights.
"""

from coat_jax.models import Batch as Batch
from coat_jax.training.data.config import DataConfig as DataConfig
from coat_jax.training.data.loader import Loader as Loader
from coat_jax.training.data.rows import Rows as Rows
from coat_jax.training.data.sources import load as load
from coat_jax.training.data.sources import rows_of as rows_of

"""Data for training: token files, text, conversations, and the built-in corpus, as batches.

    rows = rows_of(DataConfig(train=("tokens/*.npy",)), split="train", sequence=1024, vocab=32_000)
    batch = next(Loader(rows, batch=8, seed=0))     # a `Batch` of arrays [8, 1024]

Nothing is downloaded, nothing in the data is executed. Left out: mixing sources with weights.
"""

from coat_jax.models import Batch as Batch
from coat_jax.training.data.loader import Loader as Loader
from coat_jax.training.data.pictures import PicturesConfig as PicturesConfig
from coat_jax.training.data.rows import Rows as Rows
from coat_jax.training.data.sources import DataConfig as DataConfig
from coat_jax.training.data.sources import rows_of as rows_of
from coat_jax.training.data.videos import VideosConfig as VideosConfig

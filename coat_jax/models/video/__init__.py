"""Video transformers: Wan 2.1's, with dense attention or attention between tiles."""

from coat_jax.models.video import hf
from coat_jax.models.video.config import PRESETS, Config, TiledAttention, config_of
from coat_jax.models.video.model import Batch, VideoTransformer
from coat_jax.models.video.sampler import sample

__all__ = [
    "PRESETS",
    "Batch",
    "Config",
    "TiledAttention",
    "VideoTransformer",
    "config_of",
    "hf",
    "sample",
]

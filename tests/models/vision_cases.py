"""Small vision-language models, one for each way in which the families differ."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import small_model
from small_model import SMALL

from coat_jax.models.batches import IGNORED
from coat_jax.models.vision_language import Batch, Config, ImageFormat, TowerConfig, VisionLanguage
from coat_jax.models.vision_language.images import CLIP_MEAN, CLIP_STD

IMAGE, SIDE = 255, 16
TOWER = TowerConfig(images=ImageFormat(size=SIDE), patch=4, width=32, layers=2, heads=2, ffn=64)
SMOLVLM_TOWER = replace(
    TOWER,
    images=ImageFormat(size=SIDE, resize="longest", longest_edge=4 * SIDE, resample="lanczos"),
    last_norm=True,
    rounded_places=True,
)
CLIP_TOWER = replace(
    TOWER,
    images=ImageFormat(size=SIDE, resize="crop", mean=CLIP_MEAN, std=CLIP_STD),
    activation="quick_gelu",
    norm_eps=1e-5,
    class_token=True,
    patch_bias=False,
    first_norm=True,
    unused=("layer", "last_norm"),
)
SIGLIP_TOWER = replace(TOWER, ffn=48, unused=("layer", "layer", "last_norm", "head"))
QWEN2 = replace(SMALL, qkv_bias=True, tied=True)


def llava(tower, decoder=SMALL, **changes):
    return Config(tower=tower, decoder=decoder, projector="mlp", **SHARED | changes)


SHARED = {"image_token": IMAGE, "precision": "bf16", "dtype": jnp.float32}
SMOLVLM = Config(tower=SMOLVLM_TOWER, decoder=SMALL, shuffle=2, **SHARED)
FAMILIES = {
    "SmolVLM": SMOLVLM,
    "CLIP and Llama": llava(CLIP_TOWER),
    "all of CLIP": llava(
        replace(CLIP_TOWER, keeps_class_token=True, unused=("last_norm",)), projector_bias=False
    ),
    "SigLIP and Qwen2": llava(SIGLIP_TOWER, QWEN2),
    "SigLIP without a head": llava(replace(SIGLIP_TOWER, unused=("last_norm",)), QWEN2),
}


def changed(config, **changes):
    """A config with other values; those of `tower` and `decoder` are dicts."""
    parts = {k: replace(getattr(config, k), **v) for k, v in changes.items() if type(v) is dict}
    return replace(config, **changes | parts)


def filled(config):
    return small_model.filled(config, module=VisionLanguage)


def batch_of(config, *rows):
    """Rows of text and images: a number is so many tokens of text, "i" those of an image.

    Each row has an image to spare, or more.
    """
    rng, size = np.random.default_rng(0), config.tower.images.size

    def tokens_of(part):
        return np.full(config.features, IMAGE) if part == "i" else rng.integers(0, IMAGE, part)

    tokens = np.stack([np.concatenate([tokens_of(part) for part in row]) for row in rows])
    count = 1 + max(row.count("i") for row in rows)
    images = rng.integers(0, 256, (len(rows), count, size, size, 3)).astype(np.uint8)
    following = np.roll(tokens, -1, axis=1)
    labels = np.where(following == IMAGE, IGNORED, following)
    return Batch(*map(jnp.asarray, (tokens.astype(np.int32), labels.astype(np.int32), images)))

"""Texts with pictures continued: the tokens that a loop over the training forward would give."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generation_cases import variant
from small_model import QUICK, filled

from coat_jax.generation import Sampling, generate
from coat_jax.models.vision_language import Batch, Config, ImageFormat, TowerConfig, VisionLanguage

TOWER = TowerConfig(images=ImageFormat(size=16), patch=4, width=32, layers=1, heads=2, ffn=48)
CONFIG = Config(
    tower=TOWER, decoder=variant(layers=1), image_token=255, precision="bf16", dtype=jnp.float32
)
PARTS = [["ab", "i", "c", "i", "d"], ["a"], ["i", "efgh"]]  # each "i" is a picture


def naive(model, prompt, pictures, count):
    """The likeliest token, again and again."""
    graph, state = nnx.split(model)
    program = jax.jit(lambda s, b: nnx.merge(graph, s)(b)[0], compiler_options=QUICK)
    text, images = list(prompt), np.zeros((1, 2, 16, 16, 3), np.uint8)
    images[0, : len(pictures)] = pictures
    for _ in range(count):
        # Filled up behind, where no token of the text looks.
        tokens = np.full((1, 64), 1, np.int32)
        tokens[0, : len(text)] = text
        logits = program(state, Batch(jnp.asarray(tokens), None, jnp.asarray(images)))
        text.append(int(np.argmax(logits[len(text) - 1])))
    return text[len(prompt) :]


@pytest.mark.parametrize("image_token", [255, 0])
def test_greedy_tokens_are_those_of_the_training_forward(image_token):
    """Of prompts of different lengths with different numbers of pictures, which are padded."""
    model = filled(replace(CONFIG, image_token=image_token), module=VisionLanguage)
    place = [image_token] * CONFIG.features
    rng, prompts, pictures = np.random.default_rng(0), [], []
    for parts in PARTS:
        prompts.append([t for part in parts for t in (place if part == "i" else part.encode())])
        pictures.append(rng.integers(0, 256, (parts.count("i"), 16, 16, 3), np.uint8))
    found = generate(
        model, prompts, max_tokens=12, sampling=Sampling(temperature=0), images=pictures
    )
    wanted = [naive(model, *of_one, 12) for of_one in zip(prompts, pictures, strict=True)]
    assert found == wanted
    for given, message in (
        (None, "This model sees images: pass those of each prompt"),
        (pictures[:1], "images of 1 prompts, and 3 prompts"),
        ([[], *pictures[1:]], "Prompt 1 has the token .*, and its images have 0 features"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            generate(model, prompts, max_tokens=2, images=given)
    assert found[0] != naive(model, prompts[0], pictures[0][::-1], 12)

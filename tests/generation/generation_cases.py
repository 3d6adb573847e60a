"""What tests of generation share: every family of models, small and with random parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from small_model import QUICK, SMALL

from coat_jax.generation.cache import decode, prefill
from coat_jax.ops import Llama3Scaling, Rotary

LLAMA = dataclasses.replace(
    SMALL, rotary=Rotary(5e5, Llama3Scaling(original_context=32)), dtype=jnp.float32
)
FAMILIES = {
    "llama": {},
    "mistral": {"window": 7},
    "qwen2": {"qkv_bias": True, "tied": True},
    "qwen3": {"qk_norm": "head", "head_dim": 32, "window": 7},
    "olmo": {"norm": "layer"},
    "olmo2": {"norms": "after", "qk_norm": "all"},
}
LENGTHS, NEW = (19, 12, 5), 5  # lengths of the texts' beginnings; tokens that are decoded


def variant(family="llama", **changes):
    return dataclasses.replace(LLAMA, **FAMILIES[family], **changes)


def texts():
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, length + NEW) for length in LENGTHS]


def logits_at_once(model):
    """The training forward of each text, from the end of its beginning on: [B, NEW + 1, V].

    Texts begin at position 0 here, and are filled up behind, where no token of theirs looks.
    """
    graph, state = nnx.split(model)
    tokens = np.zeros((len(LENGTHS), max(LENGTHS) + NEW), np.int32)
    for row, text in enumerate(texts()):
        tokens[row, : len(text)] = text
    forward = jax.jit(lambda s, t: nnx.merge(graph, s)(t), compiler_options=QUICK)
    logits = np.asarray(forward(state, tokens))
    return np.stack([row[n - 1 : n + NEW] for row, n in zip(logits, LENGTHS, strict=True)])


def logits_one_by_one(model, *, slots=32, cache=None):
    """Likewise, from a cache: all beginnings in one batch, then one token at a time."""
    graph, state = nnx.split(model)
    starts = max(LENGTHS) - np.array(LENGTHS)
    tokens = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    for row, text in enumerate(texts()):
        tokens[row, starts[row] :] = text[:-NEW]
    following = np.stack([text[-NEW:] for text in texts()], axis=1)

    def run(state, tokens, starts, following):
        model = nnx.merge(graph, state)
        logits, begun = prefill(model, tokens, starts, slots, cache=cache)
        ended, more = jax.lax.scan(lambda c, new: decode(model, new, c)[::-1], begun, following)
        return jnp.concatenate([logits[None], more]).swapaxes(0, 1), ended

    logits, ended = jax.jit(run, compiler_options=QUICK)(state, tokens, starts, following)
    return np.asarray(logits), ended

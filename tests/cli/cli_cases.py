"""What tests of commands share: runs as the trainer leaves them, and a tokenizer of words."""

import json

import jax.numpy as jnp
from flax import nnx

from coat_jax.training.checkpoint import Checkpoints
from coat_jax.training.config import to_json
from coat_jax.training.step import State


def save_run(folder, *models):
    """A run with a checkpoint for each model, of step 1, 2, ..., with moments."""
    with Checkpoints(folder / "checkpoints", keep=len(models)) as checkpoints:
        for step, model in enumerate(models, 1):
            params, count = nnx.state(model), jnp.int32(step)
            checkpoints.save(step, State(count, params, {"m": params}, count), {}, wait=True)
    write_config(folder, models[0].config, data={})
    return folder


def write_config(run, config, **entries):
    model = to_json(config)
    (run / "config.json").write_text(json.dumps({"model": model, **entries}))


def write_words(path, *words, unknown=None, special=(), template=None):
    """A tokenizer.json of words: the first, or `unknown`, stands for all others."""
    import tokenizers

    vocab = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=unknown or words[0]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(list(special))
    if template:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            template, special_tokens=[*made.get_vocab().items()]
        )
    made.save(str(path))
    return path

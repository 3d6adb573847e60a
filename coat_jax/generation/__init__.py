"""Text from a trained model.

    stream, generate      prompts in, new tokens out, a few at a time or all at once
    Sampling              how the next token is chosen
    prefill, decode       the logits, from a cache of keys and values
    Bytes, Tokenizer      convert text and tokens; a Reader returns text that can be printed

    for new in stream(model, [tokenizer.encode("Once")], max_tokens=100):
        ...

Each `new` has a list of new tokens for each prompt.
"""

from coat_jax.generation.cache import Cache, decode, prefill
from coat_jax.generation.continuation import generate, require_prompts, stream
from coat_jax.generation.sampling import Sampling
from coat_jax.tokenizers import Bytes, Tokenizer

__all__ = [
    "Bytes",
    "Cache",
    "Sampling",
    "Tokenizer",
    "decode",
    "generate",
    "prefill",
    "require_prompts",
    "stream",
]

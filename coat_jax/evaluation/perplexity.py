"""How well a model predicts a text, which may be much longer than its context.

    window 0    [x_0 .............. x_C]          scores x_1 .. x_C
    window 1         [x_C/2 ........|.........]   scores the C/2 tokens that no window has scored
    window 2                   [............|.........]

Every token but the first is scored once, with at least C/2 tokens before it, or else the whole text
before it. Bits per byte are comparable between tokenizers: models share a text's bytes, not its
tokens.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from coat_jax.errors import UserError
from coat_jax.evaluation.likelihood import OnProgress, Passage, log_probabilities
from coat_jax.models import Llama
from coat_jax.models.protocol import require_capability


class Score(NamedTuple):
    """The likelihood of a text.

    Attributes:
        nats: the negative log probability of all scored tokens together.
        tokens: how many were scored.
        size: bytes of the text.
    """

    nats: float
    tokens: int
    size: int

    @property
    def per_token(self) -> float:
        """Nats per token: the loss that training logs."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nats per token), infinite where that is too large for a float."""
        return math.inf if self.per_token >= 700 else math.exp(self.per_token)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text in UTF-8: -log2 of its probability, divided by its bytes."""
        return self.nats / math.log(2) / self.size


def windows(tokens: Sequence[int], size: int) -> list[Passage]:
    """Returns the windows of a text.

    Args:
        tokens: of the text; the first one is not scored.
        size: the length of a window: the model's context, or less.
    """
    stride = size // 2
    last = max(0, math.ceil((len(tokens) - 1 - size) / stride))
    return [
        Passage(
            tokens[number * stride : number * stride + size + 1],
            size - stride + 1 if number else 1,
        )
        for number in range(last + 1)
    ]


def perplexity(
    model: Llama,
    texts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    *,
    window: int | None = None,
    batch: int = 8,
    progress: OnProgress = lambda done, of: None,
) -> list[Score]:
    """Returns the score of each text.

    Args:
        model: on a mesh, call this with the mesh set.
        texts: tokens of each; the first one is not scored.
        sizes: bytes of each.
        window: tokens of a window; by default the model's context.
        batch: windows at a time.
        progress: called with how many windows are done, and of how many.
    """
    require_capability("perplexity", model, "hidden", "logits")
    size = model.config.context if window is None else window
    if not 2 <= size <= model.config.context:
        raise UserError(
            f"A window of {size} must be from 2 to the model's context={model.config.context}."
        )
    of_texts = [windows(tokens, size) for tokens in texts]
    passages = [passage for of_text in of_texts for passage in of_text]
    found = iter(log_probabilities(model, passages, batch=batch, progress=progress))
    scores = []
    for of_text, tokens, of_bytes in zip(of_texts, texts, sizes, strict=True):
        nats = -math.fsum(math.fsum(next(found).tolist()) for _ in of_text)
        scores.append(Score(nats, len(tokens) - 1, of_bytes))
    return scores


def combine(scores: Sequence[Score]) -> Score:
    """Returns the score of several texts, as if they were one."""
    nats, tokens, sizes = zip(*scores, strict=True)
    return Score(math.fsum(nats), sum(tokens), sum(sizes))

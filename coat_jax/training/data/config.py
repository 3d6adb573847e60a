"""What to train on, and what to evaluate on."""

import dataclasses
from typing import Literal, get_args

from coat_jax.training.checks import require_choice, require_count

Kind = Literal["text", "chat"]
TokenDtype = Literal["uint16", "uint32"]
TEMPLATE = "<|{role}|>\n{content}{end}\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from. A path may be a pattern: 'tokens/*.npy', 'notes/**/*.md'.

    Attributes:
        train: paths of token files (.npy, .bin), or of text files and .jsonl; or "corpus", the
            source of Python's standard library as bytes.
        held_out: likewise, for evaluation. Without any, the last part of the training data is
            held out; of the corpus, every 20th file.
        held_out_part: how large that last part is.
        kind: "text" learns every token. "chat" reads .jsonl with {"messages": [{"role": ...,
            "content": ...}]} and learns the assistant's answers only.
        tokenizer: a tokenizer.json for text; None takes bytes as tokens.
        dtype: of token files without a header, uint16 or uint32; None is uint16.
        end_of_text: the token that ends a document; no token sees another document. None takes
            that of the tokenizer, or what `coat tokenize` noted beside its files.
        template: how a message of a chat is written; {end} is the token `end_of_text`.
    """

    train: tuple[str, ...] = ("corpus",)
    held_out: tuple[str, ...] = ()
    held_out_part: float = 0.01
    kind: Kind = "text"
    tokenizer: str | None = None
    dtype: TokenDtype | None = None
    end_of_text: int | None = None
    template: str = TEMPLATE

    def __post_init__(self) -> None:
        for name in ("train", "held_out"):
            paths = getattr(self, name)
            if not isinstance(paths, tuple) or not all(isinstance(p, str) and p for p in paths):
                raise ValueError(f"data.{name}={paths!r} must be a tuple of paths: ('a.npy',).")
        if not self.train:
            raise ValueError("data.train=() names no data: give paths, or 'corpus'.")
        if not 0 < self.held_out_part < 1:
            raise ValueError(
                f"data.held_out_part={self.held_out_part} must be above 0 and under 1."
            )
        require_choice("data.kind", self.kind, get_args(Kind))
        require_choice("data.dtype", self.dtype, (None, *get_args(TokenDtype)))
        if self.end_of_text is not None:
            require_count("data.end_of_text", self.end_of_text, least=0)

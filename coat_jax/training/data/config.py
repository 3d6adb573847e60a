"""The data of a run: to train on, and to evaluate on."""

import dataclasses
from typing import Annotated, Literal

from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.validation import Between, CountOrZero, require_fields

TEMPLATE = "<|{role}|>\n{content}{end}\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from. A path may be a pattern: 'tokens/*.npy', 'notes/**/*.md'.

    Attributes:
        train: paths of token files (.npy, .bin), or of text files and .jsonl; or "corpus", the
            source of Python's standard library as bytes.
        held_out: paths of data for evaluation. Without any, the end of the training data is held
            out; of the corpus, every 20th file.
        held_out_part: the share of the training data that is held out in this way.
        kind: what is learned: "text" learns every token; "chat" reads .jsonl files with
            {"messages": [{"role": ..., "content": ...}]} and learns only the assistant's answers.
        tokenizer: a tokenizer.json for text; None takes bytes as tokens.
        dtype: the dtype of token files without a header, uint16 or uint32; None is uint16.
        end_of_text: the token that ends a document; attention stays within a document. None takes
            the tokenizer's, or the one that `coat tokenize` noted beside its files.
        template: how a message of a chat is written; {end} is the token `end_of_text`.
    """

    train: tuple[str, ...] = ("corpus",)
    held_out: tuple[str, ...] = ()
    held_out_part: Annotated[float, Between(above=0, below=1)] = 0.01
    kind: Literal["text", "chat"] = "text"
    tokenizer: str | None = None
    dtype: Literal["uint16", "uint32"] | None = None
    end_of_text: CountOrZero | None = None
    template: str = TEMPLATE

    def __post_init__(self) -> None:
        require_fields(self, "data.")
        if not self.train:
            raise UserError("data.train=() names no data: give paths, or 'corpus'.")
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", str(expand_user(self.tokenizer)))

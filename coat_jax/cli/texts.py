"""The tokenizer for a folder with a model, and the tokens of a text.

--tokenizer              a tokenizer.json, or "bytes"; without it the first of
FOLDER/tokenizer.json    if it is there
data.tokenizer           in a run's config: the one that it was trained with
bytes                    if the model's vocabulary has 256 tokens
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_jax.errors import UserError
from coat_jax.files import expand_user, require_regular, utf8_failures
from coat_jax.models.batches import require_known
from coat_jax.tokenizers import AnyTokenizer, Bytes, Tokenizer
from coat_jax.training.checkpoint import weights
from coat_jax.validation import CountOrZero, brief, require

if TYPE_CHECKING:
    from coat_jax.models import Config

BYTES = "bytes"
PIECE = 1 << 16  # characters that are read first; then as many again, until there are enough tokens
UNCERTAIN = 64  # tokens at the end of what was read: more text could change them


def data_of(folder: Path, config_json: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a run was trained on, by the config.json in its folder; empty for other folders."""
    data = config_json.get("data")
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise UserError(f"{folder}/config.json: data={brief(data)} must be an object.")
    for name, kind in (("tokenizer", str | None), ("end_of_text", CountOrZero | None)):
        require(f"{folder}/config.json: data.{name}", data.get(name), kind)
    return data


def tokenizer_of(folder: Path, config: "Config", asked: str | None) -> AnyTokenizer:
    """The tokenizer of a model.

    Args:
        folder: of a run, or one of Hugging Face.
        config: of the model.
        asked: a tokenizer.json, or BYTES; None for that of the folder.
    """
    if asked == BYTES:
        return Bytes()
    config_json, own = weights.read_config_json(folder), folder / "tokenizer.json"
    file = asked or (own if own.exists() else data_of(folder, config_json).get("tokenizer"))
    if file is not None:
        # Our training puts nothing in front of a text.
        tokenizer = Tokenizer(file, begin=not weights.is_run(config_json))
        tokenizer.require_fits(config.vocab)
        return tokenizer
    if config.vocab != Bytes.vocab:
        raise UserError(
            f"{folder} has no tokenizer.json, and its model knows {config.vocab:,} tokens. Name "
            f"its tokenizer with --tokenizer FILE; or --tokenizer {BYTES}."
        )
    return Bytes()


def tokens_of(
    text: Path, folder: Path, config: "Config", asked: str | None, *, most: int
) -> list[int]:
    """The first tokens of a file by `tokenizer_of(folder, config, asked)`, `most` or fewer."""
    path, tokenizer = expand_user(text), tokenizer_of(folder, config, asked)
    require_regular(path)
    content, more = "", " "
    tokens: list[int] = []
    with (
        utf8_failures(path),
        path.open(encoding="utf-8-sig", newline="") as file,
    ):
        while more and len(tokens) < most + UNCERTAIN:
            more = file.read(len(content) or PIECE)
            content += more
            tokens = tokenizer.encode(content)
    require_known(f"{text} has", tokens[:most], config.vocab)
    return tokens[:most]

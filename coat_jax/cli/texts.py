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

if TYPE_CHECKING:
    from coat_jax.models import Config

BYTES = "bytes"
# A text is read up to this many characters, and this many more for each token that is wanted.
PIECE, LONGEST = 1 << 16, 16


def data_of(config_json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what a run was trained on, by its config.json; nothing for other folders."""
    return config_json.get("data") or {} if weights.is_run(config_json) else {}


def tokenizer_of(folder: Path, config: "Config", asked: str | None) -> AnyTokenizer:
    """Returns the tokenizer of a model.

    Args:
        folder: of a run, or one of Hugging Face.
        config: of the model.
        asked: a tokenizer.json, or BYTES; None for that of the folder.
    """
    if asked == BYTES:
        return Bytes()
    config_json, own = weights.read_config_json(folder), folder / "tokenizer.json"
    file = asked or (own if own.exists() else data_of(config_json).get("tokenizer"))
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
    """Returns the first tokens of a text, `most` or fewer; see `tokenizer_of`."""
    path, tokenizer = expand_user(text), tokenizer_of(folder, config, asked)
    require_regular(path)
    with utf8_failures(path), path.open(encoding="utf-8-sig", newline="") as file:
        tokens = tokenizer.encode(file.read(PIECE + LONGEST * most))[:most]
    require_known(f"{text} has", tokens, config.vocab)
    return tokens

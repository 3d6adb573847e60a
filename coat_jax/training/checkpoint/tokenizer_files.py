"""The small files beside a model's weights: its tokenizer, and how text is generated with it.

The folder may come from a third party, and the copies may be published: only files inside the
folder are copied. A link that leads out of it is refused, except into `blobs`, where Hugging Face's
cache has its files.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coat_jax.errors import UserError
from coat_jax.files import expand_user, read_bytes, read_json
from coat_jax.tokenizers import BYTES, Tokenizer

GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
NAMES: tuple[str, ...] = (TOKENIZER, GENERATION, "tokenizer.model", "tokenizer_config.json")
NAMES += ("vocab.json", "special_tokens_map.json", "merges.txt", "added_tokens.json")
NAMES += ("chat_template.jinja", "chat_template.json", "processor_config.json")
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def read(
    folder: Path,
    config_json: Mapping[str, Any],
    tokenizer: str | Path | None,
    vocab: int,
    note: Callable[[str], object],
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Returns the files in a model's folder, and its special tokens by their names in config.json.

    The config of a run may name a tokenizer inside; `tokenizer` is a file in place of the folder's
    own, or BYTES for none. `note` is called with a line about a missing tokenizer, and one that
    begins texts with other tokens than training did. A tokenizer must fit a model with `vocab`
    tokens.
    """
    names = (GENERATION,) if tokenizer == BYTES else NAMES
    files = {name: _read(folder, folder / name) for name in names if (folder / name).exists()}
    special = {name: config_json.get(name) for name in SPECIAL}
    data: Any = config_json.get("data")
    of_run = isinstance(data, dict)
    known = None
    if tokenizer == BYTES:
        pass
    elif tokenizer is not None:
        known = Tokenizer(tokenizer)
        known.require_fits(vocab)
    elif TOKENIZER in files:
        known = Tokenizer(folder / TOKENIZER)
    elif of_run:
        known = _tokenizer_of_run(folder, data, note)
    if known is not None:
        files[TOKENIZER] = known.content
        if of_run and (begin := known.beginning):
            spelled = " ".join(known.spelling(token) or str(token) for token in begin)
            note(
                f"The tokenizer puts {spelled} in front of each text, and training put nothing "
                "there. For texts that begin as in training, take it out of the post_processor in "
                "tokenizer.json."
            )
    # The config.json of a run has no special tokens; in a Hugging Face folder either file may.
    if of_run and GENERATION not in files:
        end = data.get("end_of_text")
        special["eos_token_id"] = known.end_of_text if end is None and known is not None else end
    generation = read_json(folder / GENERATION) if GENERATION in files else {}
    special |= {name: generation[name] for name in SPECIAL if generation.get(name) is not None}
    special = {name: token for name, token in special.items() if token is not None}
    if generation | special != generation:
        files[GENERATION] = (json.dumps(generation | special, indent=2) + "\n").encode()
    return files, special


def _tokenizer_of_run(
    folder: Path, data: Mapping[str, Any], note: Callable[[str], object]
) -> Tokenizer | None:
    """Returns the tokenizer that a run's config names, if it is in the run's folder."""
    named = data.get("tokenizer")
    if isinstance(named, str) and _is_inside(path := expand_user(named), folder):
        return Tokenizer(path)
    if named is not None or "train" in data:
        found = "it names none" if named is None else f"{named} is outside of its folder"
        note(
            f"The tokenizer of the run is not copied: {found}. Name one with --tokenizer FILE, "
            "unless the run was trained on bytes."
        )
    return None


def _read(folder: Path, path: Path) -> bytes:
    if not _is_inside(path, folder):
        raise UserError(
            f"{path} is a link to {path.resolve()}, outside of the model's folder: it is not "
            "copied. Put a copy in its place, or remove it."
        )
    return read_bytes(path)


def _is_inside(path: Path, folder: Path) -> bool:
    """Returns whether a file is in a folder, or in the blobs that this is a snapshot of."""
    place, inside = path.resolve(), folder.resolve()
    blobs = inside.parent.parent / "blobs" if inside.parent.name == "snapshots" else inside
    return place.is_relative_to(inside) or place.parent == blobs

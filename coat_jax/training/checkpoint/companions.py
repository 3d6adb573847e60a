"""The small files beside a model's weights: its tokenizer, and how text is generated with it.

The folder may come from a third party, and the copies may be published: a file is copied only if
its content fits its name, and only from inside the folder. A link that leads out of the folder is
refused, except into `blobs`, where Hugging Face's cache has its files.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coat_jax import tokenizers
from coat_jax.errors import UserError
from coat_jax.files import expanded, parse_json, path_failures, read_bytes, status
from coat_jax.training.data.paths import TOKENS

GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
OBJECTS = (
    GENERATION,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
TEXTS = ("merges.txt", "chat_template.jinja")
PIECES = "tokenizer.model"
LARGEST = 1 << 28  # bytes

Companions = dict[str, bytes]  # what is in them, by name


def read_companions(folder: Path) -> Companions:
    """The companion files in a folder; raises if one is not what its name says."""
    found = {}
    for name in (TOKENIZER, PIECES, *OBJECTS, *TEXTS):
        if status(folder / name):
            found[name] = _read(folder, folder / name)
    return found


def tokenizer_of_run(
    config_json: Mapping[str, Any], folder: Path, note: Callable[[str], object]
) -> Companions:
    """The tokenizer that a run's config names, if that is in the run's folder."""
    data = config_json.get("data")
    named = data.get("tokenizer") if isinstance(data, Mapping) else None
    if not isinstance(named, str):
        if isinstance(data, Mapping) and "train" in data:
            note(_without_tokenizer(data, folder))
        return {}
    path = expanded(named)
    if not _is_inside(path, folder):
        note(
            f"The run was trained with the tokenizer {named}, which is outside of its folder and "
            "is not copied: name it with --tokenizer."
        )
        return {}
    return {TOKENIZER: _read(folder, path, TOKENIZER)}


def generation_of_run(config_json: Mapping[str, Any], companions: Companions) -> Companions:
    """The token that ends a text, from a run's config or tokenizer, unless the run wrote it
    itself."""
    data = config_json.get("data")
    end = data.get("end_of_text") if isinstance(data, Mapping) else None
    if end is None and TOKENIZER in companions:
        end = tokenizers.known_end_of_text(tokenizers.parsed(companions[TOKENIZER], TOKENIZER))
    if type(end) is not int:
        return {}
    return {GENERATION: (json.dumps({"eos_token_id": end}, indent=2) + "\n").encode()}


def note_beginning(
    config_json: Mapping[str, Any], companions: Companions, note: Callable[[str], object]
) -> None:
    """Notes tokens that a run's tokenizer puts in front of a text, where training put nothing."""
    if "data" not in config_json or TOKENIZER not in companions:
        return  # a run without data was converted: it was trained elsewhere
    tokenizer = tokenizers.parsed(companions[TOKENIZER], TOKENIZER)
    if begin := tokenizers.beginning_of(tokenizer, TOKENIZER):
        spelled = " ".join(tokenizer.id_to_token(token) or str(token) for token in begin)
        note(
            f"The tokenizer puts {spelled} in front of each text, and training put nothing there. "
            "For texts that begin as in training, take it out of the post_processor in "
            "tokenizer.json."
        )


def _without_tokenizer(data: Mapping[str, Any], folder: Path) -> str:
    """Why the model of a run that names no tokenizer is written without one."""
    if _trained_on_tokens(data["train"]):
        return (
            "The run was trained on token files and names no tokenizer, so none is copied: name "
            "the one that made them with --tokenizer FILE."
        )
    known = data.get("end_of_text") is not None or status(folder / GENERATION)
    ends = "" if known else ", and names no token that ends a text"
    return (
        "The run was trained on bytes, for which there is no tokenizer.json: the new folder has no "
        f"tokenizer{ends}."
    )


def _trained_on_tokens(patterns: Any) -> bool:
    """Whether the data that a run's config names is tokens already."""
    first = patterns[0] if isinstance(patterns, list | tuple) and patterns else None
    return isinstance(first, str) and Path(first).suffix.lower() in TOKENS


def write_companions(companions: Companions, folder: Path) -> None:
    """Writes them to a folder."""
    for name, content in companions.items():
        (folder / name).write_bytes(content)


def _read(folder: Path, path: Path, name: str | None = None) -> bytes:
    if not _is_inside(path, folder):
        raise UserError(
            f"{path} is a link to {path.resolve()}, outside of the model's folder: it is not "
            "copied. Put a copy in its place, or remove it."
        )
    size = (status(path) or path.lstat()).st_size
    if size > LARGEST:
        raise UserError(f"{path} has {size:,} bytes, and at most {LARGEST:,} are copied.")
    content = read_bytes(path)
    _require(content, path, name or path.name)
    return content


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a file is in a folder, or in the blobs that this is a snapshot of."""
    with path_failures(path):
        place, inside = path.resolve(), folder.resolve()
    blobs = inside.parent.parent / "blobs" if inside.parent.name == "snapshots" else inside
    return place.is_relative_to(inside) or place.parent == blobs


def _require(content: bytes, path: Path, name: str) -> None:
    """Raises unless the file is what its name says."""
    if name == TOKENIZER:
        tokenizers.parsed(content, str(path))
    elif name in OBJECTS:
        if not isinstance(parse_json(content, str(path)), dict):
            raise UserError(f"{path} is not a JSON object, as its name says: remove or fix it.")
    elif name == PIECES:
        if not _is_sentencepiece(content):
            raise UserError(f"{path} is not a SentencePiece model, as its name says: remove it.")
    else:
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{path} is not text in UTF-8, as its name says: remove it.") from None


def _is_sentencepiece(content: bytes) -> bool:
    """Whether this is a protocol buffer of SentencePiece: pieces first, then their trainer's."""
    place, fields = 0, []
    try:
        while place < len(content):
            fields.append(content[place])
            size, place = _varint(content, place + 1)
            place += size
    except IndexError:
        return False
    return place == len(content) and fields[:1] == [0x0A] and fields == sorted(fields)


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """The variable-length integer at a place, and the place after it."""
    value = shift = 0
    while True:
        byte = content[place]
        value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
        if byte < 0x80:
            return value, place

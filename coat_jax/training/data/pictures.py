"""Conversations with pictures, for vision-language models.

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.jpg"},
                                               {"type": "text", "text": "What is it?"}]},
                  {"role": "assistant", "content": "A cat."}]}
    {"image": "cat.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"},
                                           {"from": "gpt", "value": "A cat."}]}         LLaVA's

Lines of .jsonl, or of LLaVA's kind the list in a .json. A conversation may have several pictures,
or none. In its text each picture becomes `picture_before`, `image_token` for each of its features,
and `picture_after`. A conversation that is longer than a row is cut, but never within a picture.
The header of every picture is read; `picture_rows` decodes them.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from rich.console import Console

from coat_jax.errors import UserError
from coat_jax.files import expand_user, json_lines, parse_json, read_bytes, read_failures
from coat_jax.models.vision_language import Config
from coat_jax.models.vision_language.images import ImageFormat, read_header
from coat_jax.printable import amount
from coat_jax.tokenizers import AnyTokenizer, document_tokenizer
from coat_jax.training.data import chat
from coat_jax.training.data.chat import Message
from coat_jax.training.data.drawings import DRAWINGS
from coat_jax.training.data.packing import Documents
from coat_jax.training.data.sources import TEMPLATE
from coat_jax.validation import Between, Count, CountOrZero, brief, require_fields

PLACE = "<image>"  # of a picture, in LLaVA's text
TURN = ("from", "value")  # the fields of a message there
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}  # LLaVA's, and ours
OFTEN = 1000  # conversations between two reports
BESIDE = ("image", "images")  # where other formats name pictures


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturesConfig:
    """Where conversations with pictures come from. A path may be a pattern: 'talks/*.jsonl'.

    Attributes:
        train: paths of .jsonl or .json files; or "drawings", drawn numbers with questions.
        held_out: paths of data for evaluation. Without any, the end of the training data is held
            out; of the drawings, others than those of training.
        held_out_part: the share of the training data that is held out in this way.
        pictures: the folder that the paths of pictures start from, and may not leave; by default
            the one of the file that names them.
        pictures_per_row: how many a row has room for. The tower sees as many in every row.
        picture_before: text before each picture, in which special tokens are meant as such.
        picture_after: the same, after each picture.
        tokenizer: a tokenizer.json for text; None takes bytes as tokens.
        end_of_text: the token that ends a message and a conversation; None takes the tokenizer's.
        template: how a message is written; {end} is the token `end_of_text`.
    """

    train: tuple[str, ...] = (DRAWINGS,)
    held_out: tuple[str, ...] = ()
    held_out_part: Annotated[float, Between(above=0, below=1)] = 0.01
    pictures: str | None = None
    pictures_per_row: Count = 1
    picture_before: str = ""
    picture_after: str = ""
    tokenizer: str | None = None
    end_of_text: CountOrZero | None = None
    template: str = TEMPLATE

    def __post_init__(self) -> None:
        require_fields(self, "data.")
        if not self.train:
            raise UserError("data.train=() names no data: give paths, or 'drawings'.")
        for name in ("tokenizer", "pictures"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, str(expand_user(path)))


class Picture(NamedTuple):
    """A picture of a conversation."""

    path: Path
    place: str  # file and line, for errors


class Conversations(NamedTuple):
    """Conversations as tokens, and their pictures in order."""

    documents: Documents
    pictures: list[Picture]
    counts: Int64[np.ndarray, " D"]  # pictures of each conversation
    end_of_text: int | None
    cut: Bool[np.ndarray, " D"]  # whether a conversation was longer than a row

    def part(self, numbers: range) -> "Conversations":
        """Returns the conversations of a range of indices."""
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        part = slice(numbers.start, numbers.stop)
        return self._replace(
            documents=self.documents.part(numbers),
            pictures=self.pictures[ends[numbers.start] : ends[numbers.stop]],
            counts=self.counts[part],
            cut=self.cut[part],
        )


def read(paths: list[Path], config: PicturesConfig, model: Config, sequence: int) -> Conversations:
    """Reads conversations, and cuts those that are longer than a row."""
    tokenizer = tokenizer_of(config, model)
    block = picture_tokens(tokenizer, config, model)
    pictures: list[Picture] = []
    counts: list[int] = []
    places: list[str] = []

    def messages() -> Iterator[Message]:
        for path in paths:
            root = path.parent if config.pictures is None else Path(config.pictures)
            for place, record in _records(path):
                before = len(pictures)
                split = partial(_split, pictures, model.tower.images, root, place)
                found = chat.messages_of(place, _as_messages(place, record), split)
                count = len(pictures) - before
                if count > config.pictures_per_row:
                    raise UserError(
                        f"{place} has {amount(count, 'picture')}, and a row has room for "
                        f"{config.pictures_per_row}. Raise data.pictures_per_row."
                    )
                if not count and any(map(record.get, BESIDE)):
                    raise UserError(
                        f"{place} names pictures beside its messages, which would be left out. In "
                        'a message, one is {"type": "image", "image": "cat.jpg"}.'
                    )
                counts.append(count)
                places.append(place)
                if len(places) % OFTEN == 0:
                    status.update(f"Read {len(places):,} conversations, {len(pictures):,} pictures")
                yield from found

    with Console(stderr=True).status("Reading conversations") as status:
        documents = chat.tokenize(messages(), paths, tokenizer, config.template, block)
    starts = np.concatenate([[0], documents.ends[:-1]])
    seen = np.add.reduceat(documents.tokens == model.image_token, starts)
    if len(wrong := np.flatnonzero(seen != np.multiply(counts, model.features))):
        raise UserError(
            f"{places[wrong[0]]}: its text has the token {model.image_token}, which stands for a "
            "picture. Remove it there, or set data.tokenizer to the model's."
        )
    cut = np.zeros(len(counts), bool)
    found = Conversations(documents, pictures, np.array(counts), tokenizer.end_of_text, cut)
    return _cut(found, block, model, sequence)


def tokenizer_of(config: PicturesConfig, model: Config) -> AnyTokenizer:
    """Returns the tokenizer of the conversations; raises if the model has too few tokens."""
    around = config.picture_before + config.picture_after
    tokenizer = document_tokenizer(
        config.tokenizer, config.end_of_text, template=chat.spelling(config.template) + around
    )
    if tokenizer.vocab > model.vocab or model.image_token > np.iinfo(tokenizer.dtype.name).max:
        raise UserError(
            f"data.tokenizer={config.tokenizer} has {tokenizer.vocab:,} tokens, and the model has "
            f"{model.vocab:,}, of which {model.image_token:,} stands for a picture. Set it to the "
            "model's own, or raise model.decoder.vocab."
        )
    return tokenizer


def picture_tokens(tokenizer: AnyTokenizer, config: PicturesConfig, model: Config) -> list[int]:
    """Returns the tokens of a picture."""
    before, after = (
        tokenizer.encode_markers(text, after="text").tolist() if text else []
        for text in (config.picture_before, config.picture_after)
    )
    return [*before, *[model.image_token] * model.features, *after]


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix.lower() != ".json":
        yield from ((place, record) for place, record, _ in json_lines(path))
        return
    with read_failures(path):
        listed = parse_json(read_bytes(path), str(path))
    if not isinstance(listed, list) or not all(isinstance(record, dict) for record in listed):
        raise UserError(f"{path} is no list of conversations. One a line belongs into a .jsonl.")
    yield from ((f"{path}, record {number}", record) for number, record in enumerate(listed, 1))


def _as_messages(place: str, record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record with "messages": one of LLaVA's is rewritten."""
    if not isinstance(turns := record.get("conversations"), list):
        return record
    paths = record.get("image") or []
    paths = [paths] if isinstance(paths, str) else paths
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise UserError(f'{place}: "image" is a path or a list of paths, not {brief(paths)}.')
    following = iter(paths)
    messages: list[dict[str, Any]] = []
    for turn in turns:
        fields = turn if isinstance(turn, dict) else {}
        role, value = ROLES.get(str(fields.get("from"))), fields.get("value")
        if role is None or not isinstance(value, str):
            raise UserError(
                f'{place}: a turn is {{"from": ..., "value": "..."}} with one of {", ".join(ROLES)}'
                f", and this one is {brief(turn)}."
            )
        first, *others = value.split(PLACE)
        content: list[dict[str, Any]] = [{"type": "text", "text": first}]
        for text in others:
            picture = {"type": "image", "image": next(following, None)}
            content += [picture, {"type": "text", "text": text}]
        rest = {name: value for name, value in fields.items() if name not in TURN}
        messages.append(rest | {"role": role, "content": content})
    places = sum(len(message["content"]) // 2 for message in messages)
    if places != len(paths):
        raise UserError(
            f'{place} has {amount(len(paths), "picture")} in "image" and {places} {PLACE} in its '
            "text: give as many of both."
        )
    return record | {"messages": messages}


def _split(
    pictures: list[Picture], format: ImageFormat, root: Path, place: str, content: Any
) -> tuple[str, ...] | None:
    """Splits the content of a message at its pictures, which are appended to `pictures`."""
    if isinstance(content, str):
        return (content,)
    texts = [""]
    for part in content if isinstance(content, list) else [None]:
        match part:
            case {"type": "text", "text": str(text)}:
                texts[-1] += text
            case {"type": "image", "image": str(path)}:
                found = read_header(path, format, root=root, where=place)
                pictures.append(Picture(found, place))
                texts.append("")
            case _:
                return None
    return tuple(texts)


def _cut(found: Conversations, block: list[int], model: Config, sequence: int) -> Conversations:
    """Leaves out the end of conversations that are longer than a row, and pictures there."""
    tokens, learned, ends = found.documents
    starts, last = np.concatenate([[0], ends[:-1]]), np.cumsum(found.counts)
    is_long = ends - starts > sequence
    # A picture is cut out whole, with the text around it.
    first_features = np.flatnonzero(tokens == model.image_token)[:: model.features]
    begins = first_features - (block.index(model.image_token) if len(first_features) else 0)
    finishes = begins + len(block)
    kept, kept_pictures = np.ones(len(tokens), bool), np.ones(len(begins), bool)
    counts = found.counts.copy()
    for number in np.flatnonzero(is_long):
        own = slice(last[number] - counts[number], last[number])
        end = starts[number] + sequence
        divided = (begins[own] < end) & (end < finishes[own])
        end = begins[own][divided].min(initial=end)
        kept[end : ends[number]] = False
        kept_pictures[own] = finishes[own] <= end
        counts[number] = kept_pictures[own].sum()
    documents = Documents(tokens[kept], learned[kept], np.cumsum(np.add.reduceat(kept, starts)))
    pictures = [p for p, is_kept in zip(found.pictures, kept_pictures, strict=True) if is_kept]
    return Conversations(documents, pictures, counts, found.end_of_text, is_long)

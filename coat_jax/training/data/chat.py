"""Conversations as tokens, of which the assistant's answers are learned.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}

    <|user|>        with the template '<|{role}|>\\n{content}{end}\\n', where {end} stands for the
    Hi.             token end_of_text, here a period; the model learns 'Hello.'
    <|assistant|>
    Hello.

An answer whose "weight" is 0 is not learned; other fields of a message, such as tool_calls, are
refused. Special tokens in a template are meant as such; in a message they are ordinary text.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coat_jax.errors import UserError
from coat_jax.files import json_lines
from coat_jax.tokenizers import After, AnyTokenizer
from coat_jax.training.data.packing import Documents
from coat_jax.training.data.paths import listing
from coat_jax.training.data.tokenizing import encode
from coat_jax.validation import brief

ROLES = ("system", "user", "assistant")
LEARNED = "assistant"
PARTS = ("content", "end")  # of a template, besides the role
FIELDS = ("role", "content", "weight")
TOGETHER = 8192  # messages that are tokenized at once


class Message(NamedTuple):
    """A message of a conversation."""

    role: str
    texts: tuple[str, ...]  # its content: before the first picture, between them, after the last
    learned: bool
    begins: bool  # whether it is the first of its conversation
    place: str  # file and line, for errors


def parts_of(template: str) -> tuple[str, str, str]:
    """Returns a template's text before a message's content, after it, and after its end."""
    head, _, rest = template.partition("{content}")
    after_content, _, after_end = rest.partition("{end}")
    once = all(template.count(f"{{{part}}}") == 1 for part in PARTS)
    roles = template.count("{role}") + template.count("{Role}")
    if not once or roles != 1 or for_role(head, "") == head or "\\n" in template:
        raise UserError(
            f"data.template={template!r} must have {{role}}, {{content}} and {{end}}, once each "
            "and in this order, and no backslash with an n where a new line is meant. In a shell, "
            "$'{role}\\n{content}{end}\\n' has new lines. {Role} begins with a capital letter."
        )
    return head, after_content, after_end


def for_role(text: str, role: str) -> str:
    """Returns a part of a template with the name of a role: "user", or "User" for {Role}."""
    return text.replace("{role}", role).replace("{Role}", role.capitalize())


def spelling(template: str) -> str:
    """Returns what a template spells out around messages of every role."""
    around = template.replace("{content}", "\0").replace("{end}", "\0")
    return "\0".join(for_role(around, role) for role in ROLES)


def read(paths: list[Path], tokenizer: AnyTokenizer, template: str) -> Documents:
    """Returns the conversations of these files as tokens, written as the template says."""
    messages = (
        message
        for path in paths
        for place, record, _ in json_lines(path)
        for message in messages_of(place, record)
    )
    return tokenize(messages, paths, tokenizer, template)


def tokenize(
    messages: Iterable[Message],
    paths: list[Path],
    tokenizer: AnyTokenizer,
    template: str,
    picture: Sequence[int] = (),
) -> Documents:
    """Returns conversations as tokens.

    Args:
        messages: of all conversations.
        paths: the files that they come from, for errors.
        tokenizer: makes the tokens.
        template: how a message is written.
        picture: the tokens that stand for a picture, which are not learned.
    """
    head, after_content, after_end = parts_of(template)
    after_another: After = "text" if after_end else "end"
    heads = {
        (role, begins): tokenizer.encode_markers(
            for_role(head, role), after="nothing" if begins else after_another
        )
        for role in ROLES
        for begins in (True, False)
    }
    before_end = tokenizer.encode_markers(after_content, after="text")
    end = np.append(before_end, np.array(tokenizer.end_of_text, tokenizer.dtype))
    tail = tokenizer.encode_markers(after_end, after="end")
    between = np.array(picture, tokenizer.dtype)
    batches, waiting = [], iter(messages)
    while batch := list(islice(waiting, TOGETHER)):
        texts = [(text, message.place) for message in batch for text in message.texts]
        encoded = iter(encode(tokenizer, *zip(*texts, strict=True), continued=True))
        tokens, learned, lengths = [], [], []
        for message in batch:
            parts = [(heads[message.role, message.begins], False)]
            for number in range(len(message.texts)):
                parts += [(between, False)] if number else []
                parts.append((next(encoded), message.learned))
            parts += [(end, message.learned), (tail, False)]
            tokens += [part for part, _ in parts]
            learned += [np.full(len(part), is_learned) for part, is_learned in parts]
            lengths.append(sum(len(part) for part, _ in parts))
        begins = np.array([message.begins for message in batch])
        batches.append((*map(np.concatenate, (tokens, learned)), np.array(lengths), begins))
    if not batches:
        raise UserError(f"There is no conversation in {listing(paths)}.")
    arrays: list[np.ndarray] = [np.concatenate(of_all) for of_all in zip(*batches, strict=True)]
    ends = np.cumsum(np.add.reduceat(arrays[2], np.flatnonzero(arrays[3])))
    return Documents(arrays[0], arrays[1], ends)


Split = Callable[[Any], tuple[str, ...] | None]  # a message's content to its texts; None if neither


def only_text(content: Any) -> tuple[str, ...] | None:
    """Returns the content of a message without pictures."""
    return (content,) if isinstance(content, str) else None


def messages_of(place: str, record: dict[str, Any], split: Split = only_text) -> list[Message]:
    """Returns the messages of a conversation; raises unless something can be learned from them."""
    messages = record.get("messages")
    listed = messages if isinstance(messages, list) else []
    found = [_message(place, message, number == 0, split) for number, message in enumerate(listed)]
    if not any(message.learned for message in found):
        raise UserError(
            f'{place} has no "messages", or none of the {LEARNED} whose weight is not 0: '
            f"nothing can be learned. Its keys are {brief(sorted(record))}."
        )
    return found


def _message(place: str, message: Any, begins: bool, split: Split) -> Message:
    fields = message if isinstance(message, dict) else {}
    role, content, weight = (fields.get(name) for name in FIELDS)
    others = [name for name, value in fields.items() if value and name not in FIELDS]
    weights = (None, 0, 1) if role == LEARNED else (None, 0)
    texts = split(content)
    if others or texts is None or role not in ROLES or weight not in weights:
        raise UserError(
            f'{place}: a message is {{"role": ..., "content": "..."}} with one of the roles '
            f'{ROLES}, and perhaps "weight": 0, or 1 of the {LEARNED}. Training would leave out '
            f"anything else, and this one has {brief(others or message)}."
        )
    return Message(role, texts, role == LEARNED and weight != 0, begins, place)

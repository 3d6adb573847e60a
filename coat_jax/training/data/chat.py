"""Conversations as tokens, of which the assistant's answers are learned.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}

    <|user|>        with the template '<|{role}|>\\n{content}{end}\\n', where {end} stands for the
    Hi.             token end_of_text, here a period; the model learns 'Hello.'
    <|assistant|>
    Hello.

An answer whose "weight" is 0 is not learned; other fields of a message, such as tool_calls, are
refused. Special tokens in a template are meant as such; in a message they are ordinary text.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coat_jax.errors import UserError
from coat_jax.tokenizers import OTHER_TEXT, AnyTokenizer
from coat_jax.training.data.packing import Documents
from coat_jax.training.data.paths import listed
from coat_jax.training.data.tokenizing import encode, records
from coat_jax.validation import brief

ROLES = ("system", "user", "assistant")
LEARNED = "assistant"
PARTS = ("role", "content", "end")  # of a template
FIELDS = ("role", "content", "weight")
TOGETHER = 8192  # messages that are tokenized at once
IN_MEMORY = 2 << 30  # bytes of files: their tokens are kept in memory


class Message(NamedTuple):
    """A message of a conversation."""

    role: str
    content: str
    learned: bool
    begins: bool  # whether it is the first of its conversation
    place: str  # file and line, for errors


def parts_of(template: str) -> tuple[str, str, str]:
    """The text of a template before a message's content, after it, and after its end."""
    head, _, rest = template.partition("{content}")
    after_content, _, after_end = rest.partition("{end}")
    if "{role}" not in head or any(template.count(f"{{{p}}}") != 1 for p in PARTS):
        raise UserError(
            f"data.template={template!r} must have {{role}}, {{content}} and {{end}}, once each "
            "and in this order."
        )
    if "\\n" in template:
        raise UserError(
            f"data.template={template!r} has a backslash and an n where a new line must be meant. "
            "In a shell, $'{role}\\n{content}{end}\\n' has new lines."
        )
    return head, after_content, after_end


def spelled(template: str) -> str:
    """All that a template spells out around messages of every role."""
    head, *after = parts_of(template)
    return OTHER_TEXT.join([*(head.replace("{role}", role) for role in ROLES), *after])


def read(paths: list[Path], tokenizer: AnyTokenizer, template: str) -> Documents:
    """The conversations of these files as tokens, each message as the template says."""
    encode_messages = _encoder(tokenizer, *parts_of(template))
    messages = (message for path in paths for message in _messages(path))
    written = []
    while batch := list(islice(messages, TOGETHER)):
        written.append(encode_messages(batch))
    if not written:
        raise UserError(f"There is no conversation in {listed(paths)}.")
    tokens, learned, lengths, begins = map(np.concatenate, zip(*written, strict=True))
    return Documents(tokens, learned, np.cumsum(np.add.reduceat(lengths, np.flatnonzero(begins))))


def _encoder(
    tokenizer: AnyTokenizer, head: str, after_content: str, after_end: str
) -> Callable[[list[Message]], tuple[np.ndarray, ...]]:
    """A function from messages to arrays.

    These are their tokens, whether each token is learned, and for each message its length and
    whether it begins a conversation.
    """
    after_message = OTHER_TEXT if after_end else tokenizer.end_marker
    heads = {
        (role, begins): tokenizer.encode_markers(
            head.replace("{role}", role), after="" if begins else after_message
        )
        for role in ROLES
        for begins in (True, False)
    }
    before_end = tokenizer.encode_markers(after_content, after=OTHER_TEXT)
    end = np.append(before_end, np.array(tokenizer.end_of_text, tokenizer.dtype))
    tail = tokenizer.encode_markers(after_end, after=tokenizer.end_marker)

    def encode_messages(messages: list[Message]) -> tuple[np.ndarray, ...]:
        texts = [message.content for message in messages]
        places = [message.place for message in messages]
        contents = encode(tokenizer, texts, [True] * len(texts), places)
        parts, learned = [], []
        for message, content in zip(messages, contents, strict=True):
            parts += [heads[message.role, message.begins], content, end, tail]
            learned += [False, message.learned, message.learned, False]
        lengths = np.array([len(part) for part in parts])
        begins = np.array([message.begins for message in messages])
        of_messages = lengths.reshape(-1, 4).sum(axis=1)
        return np.concatenate(parts), np.repeat(learned, lengths), of_messages, begins

    return encode_messages


def _messages(path: Path) -> Iterator[Message]:
    for place, record, _ in records(path):
        messages = record.get("messages")
        if not isinstance(messages, list) or not messages:
            raise UserError(
                f'{place} has no "messages" that are a list of at least one; its keys are '
                f"{brief(sorted(record))}."
            )
        found = [_message(place, message, number == 0) for number, message in enumerate(messages)]
        if not any(message.learned for message in found):
            raise UserError(
                f"{place} has no message of the {LEARNED}, or all have weight 0: nothing can be "
                "learned."
            )
        yield from found


def _message(place: str, message: Any, begins: bool) -> Message:
    fields = message if isinstance(message, dict) else {}
    role, content, weight = (fields.get(name) for name in FIELDS)
    if lost := [name for name, value in fields.items() if value and name not in FIELDS]:
        raise UserError(
            f"{place}: a message has {', '.join(lost)}, which training would leave out: write what "
            "it says into the content, or remove it."
        )
    if not isinstance(content, str) or role not in ROLES:
        raise UserError(
            f'{place}: a message is {{"role": ..., "content": "..."}} with one of the roles '
            f"{ROLES}, not {brief(message)}."
        )
    if weight not in ((None, 0, 1) if role == LEARNED else (None, 0)):
        raise UserError(
            f"{place}: weight={brief(weight)} must be 0, or 1 in a message of the {LEARNED}."
        )
    return Message(role, content, role == LEARNED and weight != 0, begins, place)

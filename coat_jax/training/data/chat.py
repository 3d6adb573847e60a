"""Conversations as tokens, of which the assistant's answers are learned.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}

    <|user|>        with the template '<|{role}|>\\n{content}{end}\\n', where {end} stands for the
    Hi.             token end_of_text, here a period; the model learns 'Hello.'
    <|assistant|>
    Hello.

An answer whose "weight" is 0 is not learned; other fields of a message, such as tool_calls, are
refused. Special tokens in a template are meant as such; in a message they are ordinary text.
"""

from collections.abc import Iterator
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
PARTS = ("role", "content", "end")  # of a template
FIELDS = ("role", "content", "weight")
TOGETHER = 8192  # messages that are tokenized at once


class Message(NamedTuple):
    """A message of a conversation."""

    role: str
    content: str
    learned: bool
    begins: bool  # whether it is the first of its conversation
    place: str  # file and line, for errors


def parts_of(template: str) -> tuple[str, str, str]:
    """Returns a template's text before a message's content, after it, and after its end."""
    head, _, rest = template.partition("{content}")
    after_content, _, after_end = rest.partition("{end}")
    once = all(template.count(f"{{{part}}}") == 1 for part in PARTS)
    if not once or "{role}" not in head or "\\n" in template:
        raise UserError(
            f"data.template={template!r} must have {{role}}, {{content}} and {{end}}, once each "
            "and in this order, and no backslash with an n where a new line is meant. In a shell, "
            "$'{role}\\n{content}{end}\\n' has new lines."
        )
    return head, after_content, after_end


def spelling(template: str) -> str:
    """Returns what a template spells out around messages of every role."""
    around = template.replace("{content}", "\0").replace("{end}", "\0")
    return "\0".join(around.replace("{role}", role) for role in ROLES)


def read(paths: list[Path], tokenizer: AnyTokenizer, template: str) -> Documents:
    """Returns the conversations of these files as tokens, written as the template says."""
    head, after_content, after_end = parts_of(template)
    after_another: After = "text" if after_end else "end"
    heads = {
        (role, begins): tokenizer.encode_markers(
            head.replace("{role}", role), after="nothing" if begins else after_another
        )
        for role in ROLES
        for begins in (True, False)
    }
    before_end = tokenizer.encode_markers(after_content, after="text")
    end = np.append(before_end, np.array(tokenizer.end_of_text, tokenizer.dtype))
    tail = tokenizer.encode_markers(after_end, after="end")
    messages = (message for path in paths for message in _messages(path))
    batches = []
    while batch := list(islice(messages, TOGETHER)):
        _, texts, is_learned, is_first, places = zip(*batch, strict=True)
        contents = encode(tokenizer, texts, places, continued=True)
        parts = [
            part
            for message, content in zip(batch, contents, strict=True)
            for part in (heads[message.role, message.begins], content, end, tail)
        ]
        lengths = np.array([len(part) for part in parts])
        of_tokens = np.repeat(np.outer(is_learned, [False, True, True, False]), lengths)
        of_messages = lengths.reshape(-1, 4).sum(axis=1)
        batches.append((np.concatenate(parts), of_tokens, of_messages, np.array(is_first)))
    if not batches:
        raise UserError(f"There is no conversation in {listing(paths)}.")
    tokens, learned, lengths, begins = map(np.concatenate, zip(*batches, strict=True))
    return Documents(tokens, learned, np.cumsum(np.add.reduceat(lengths, np.flatnonzero(begins))))


def _messages(path: Path) -> Iterator[Message]:
    for place, record, _ in json_lines(path):
        messages = record.get("messages")
        listed = messages if isinstance(messages, list) else []
        found = [_message(place, message, number == 0) for number, message in enumerate(listed)]
        if not any(message.learned for message in found):
            raise UserError(
                f'{place} has no "messages", or none of the {LEARNED} whose weight is not 0: '
                f"nothing can be learned. Its keys are {brief(sorted(record))}."
            )
        yield from found


def _message(place: str, message: Any, begins: bool) -> Message:
    fields = message if isinstance(message, dict) else {}
    role, content, weight = (fields.get(name) for name in FIELDS)
    others = [name for name, value in fields.items() if value and name not in FIELDS]
    weights = (None, 0, 1) if role == LEARNED else (None, 0)
    if others or not isinstance(content, str) or role not in ROLES or weight not in weights:
        raise UserError(
            f'{place}: a message is {{"role": ..., "content": "..."}} with one of the roles '
            f'{ROLES}, and perhaps "weight": 0, or 1 of the {LEARNED}. Training would leave out '
            f"anything else, and this one has {brief(others or message)}."
        )
    return Message(role, content, role == LEARNED and weight != 0, begins, place)

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
from coat_jax.limits import shown
from coat_jax.tokenizers import OTHER_TEXT, AnyTokenizer
from coat_jax.training.data.packing import Documents
from coat_jax.training.data.paths import listed
from coat_jax.training.data.text_files import encode, records

ROLES = ("system", "user", "assistant")
LEARNED = "assistant"
FIELDS = ("role", "content", "weight")
TOGETHER = 1024  # conversations that are tokenized at once
IN_MEMORY = 2 << 30  # bytes of files: their tokens are kept in memory


class Message(NamedTuple):
    """A message of a conversation."""

    role: str
    content: str
    learned: bool
    place: str  # file and line, for errors


class Template(NamedTuple):
    """The text of a template around its role, content and end."""

    before_role: str
    after_role: str
    after_content: str
    after_end: str

    def head(self, role: str) -> str:
        """The text before the content of a message."""
        return self.before_role + role + self.after_role


def template_of(text: str) -> Template:
    """Reads a template; raises unless it has {role}, {content} and {end}, once, in this order."""
    if "\\n" in text:
        raise UserError(
            f"data.template={text!r} has a backslash and an n where a new line must be meant. In a "
            "shell, $'{role}\\n{content}{end}\\n' has new lines."
        )
    before, role, rest = text.partition("{role}")
    after_role, content, rest = rest.partition("{content}")
    after_content, end, after = rest.partition("{end}")
    if not (role and content and end) or any(text.count(p) > 1 for p in (role, content, end)):
        raise UserError(
            f"data.template={text!r} must have {{role}}, {{content}} and {{end}}, once each and in "
            "this order."
        )
    return Template(before, after_role, after_content, after)


def spelled(text: str) -> str:
    """All that a template spells out around messages of every role."""
    template = template_of(text)
    heads = [template.head(role) for role in ROLES]
    return OTHER_TEXT.join([*heads, template.after_content, template.after_end])


def read(paths: list[Path], tokenizer: AnyTokenizer, template: str) -> Documents:
    """The conversations of these files as tokens, each message as the template says."""
    writer = _Writer(tokenizer, template_of(template))
    conversations = (found for path in paths for found in _conversations(path))
    written = []
    while batch := list(islice(conversations, TOGETHER)):
        written.append(writer.write(batch))
    if not written:
        raise UserError(f"There is no conversation in {listed(paths)}.")
    tokens, learned, lengths = (np.concatenate(arrays) for arrays in zip(*written, strict=True))
    return Documents(tokens, learned, np.cumsum(lengths))


class _Writer:
    """Tokenizes messages; the template's text around their contents is tokenized once."""

    def __init__(self, tokenizer: AnyTokenizer, template: Template):
        self._tokenizer = tokenizer
        after_message = OTHER_TEXT if template.after_end else tokenizer.end_marker
        # By role, and by whether the message is the first one.
        self._heads = {
            (role, first): tokenizer.encode_markers(
                template.head(role), after="" if first else after_message
            )
            for role in ROLES
            for first in (True, False)
        }
        end = np.array([tokenizer.end_of_text], tokenizer.dtype)
        before_end = tokenizer.encode_markers(template.after_content, after=OTHER_TEXT)
        self._end = np.concatenate([before_end, end])
        self._tail = tokenizer.encode_markers(template.after_end, after=tokenizer.end_marker)

    def write(self, conversations: list[list[Message]]) -> tuple[np.ndarray, ...]:
        """Tokens, whether each is learned, and the length of each conversation."""
        messages = [message for conversation in conversations for message in conversation]
        first = [place == 0 for conversation in conversations for place in range(len(conversation))]
        texts = [message.content for message in messages]
        places = [message.place for message in messages]
        contents = encode(self._tokenizer, texts, [True] * len(texts), places)
        parts, learned = [], []
        for message, begins, content in zip(messages, first, contents, strict=True):
            parts += [self._heads[message.role, begins], content, self._end, self._tail]
            learned += [False, message.learned, message.learned, False]
        lengths = np.array([len(part) for part in parts])
        firsts = np.cumsum([0] + [4 * len(conversation) for conversation in conversations])[:-1]
        of_each = np.add.reduceat(lengths, firsts)
        return np.concatenate(parts), np.repeat(learned, lengths), of_each


def _conversations(path: Path) -> Iterator[list[Message]]:
    for place, record, _ in records(path):
        messages = record.get("messages")
        if not isinstance(messages, list):
            raise UserError(
                f'{place} has no "messages" that are a list; its keys are {shown(sorted(record))}.'
            )
        if not messages:
            raise UserError(f"{place} is a conversation without messages: remove the line.")
        found = [_message(place, message) for message in messages]
        if not any(message.learned for message in found):
            raise UserError(
                f"{place} has no message of the {LEARNED}, or all have weight 0: nothing can be "
                "learned."
            )
        yield found


def _message(place: str, message: Any) -> Message:
    fields = message if isinstance(message, dict) else {}
    role, content, weight = (fields.get(name) for name in FIELDS)
    if lost := [name for name, value in fields.items() if value and name not in FIELDS]:
        raise UserError(
            f"{place}: a message has {', '.join(lost)}, which training would leave out: write what "
            "it says into the content, or remove it."
        )
    if not isinstance(content, str):
        raise UserError(
            f'{place}: a message is {{"role": ..., "content": "..."}}, not {shown(message)}.'
        )
    if role not in ROLES:
        raise UserError(f"{place}: role {shown(role)} must be one of {ROLES}.")
    if weight not in ((None, 0, 1) if role == LEARNED else (None, 0)):
        raise UserError(
            f"{place}: weight={shown(weight)} must be 0, or 1 in a message of the {LEARNED}."
        )
    return Message(role, content, role == LEARNED and weight != 0, place)

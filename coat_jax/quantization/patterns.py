"""Compiles third parties' regular expressions, unless matching could take very long.

Python's `re` tries one way to match after another, and a short pattern may have more ways than can
ever be tried: `(a+)+b`, or `a?` many times. Nothing interrupts a match, so a limit on time would
not help, and a limit on length would allow these patterns. Therefore the ways are counted
beforehand, from the pattern's text.
"""

import math
import re

NAME = 48  # characters; the names of projections are shorter
MOST_WAYS = 4_000_000  # to match a name by all patterns of a file: tried in a fraction of a second
TOKEN = re.compile(
    r"""
      \A\(\?[aiLmsu]+\)
    | \\.
    | \[\^?\]?(?:[^\]\\]|\\.)*\]
    | (?P<open>\((?:\?(?:[:=!]|<[=!]|P<\w+>)|(?!\?)))
    | (?P<branch>\|)
    | (?P<close>\))
    | (?P<quantifier>(?:[*+?]|\{\d*,?\d*\})[?+]?)
    | (?P<unread>\()
    | .
    """,
    re.VERBOSE | re.DOTALL,
)


def compile_bounded(pattern: str) -> tuple[re.Pattern[str], int]:
    """A pattern, and in how many ways at most it can match; ValueError if it is not supported.

    A quantifier chooses where its part of a name ends, and these places follow one another, so that
    q quantifiers have NAME + q over q choices. A group chooses one of its branches. This does not
    bound a group that is repeated and has a choice in it, or a part that is repeated very often:
    both are refused.
    """
    try:
        found = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    quantifiers, choices, branches = 0, 0, 1
    opened = [(0, 1)]  # of the pattern and each open group: choices before it, and its branches
    closed_with_choice = False  # whether a group with a choice in it ends just here
    for token in TOKEN.finditer(pattern):
        kind, text = token.lastgroup, token.group()
        repeated, closed_with_choice = closed_with_choice, False
        if kind == "unread":
            start = pattern[token.start() :][:4]
            raise ValueError(f"{start!r} begins a kind of group that is not read")
        if kind == "open":
            opened.append((choices, 1))
        elif kind == "branch":
            before, own = opened.pop()
            opened.append((before, own + 1))
            choices += 1
        elif kind == "close":
            before, own = opened.pop()
            branches *= own
            closed_with_choice = choices > before
        elif kind == "quantifier":
            if repeated and not text.startswith("?"):
                raise ValueError("a group that is repeated has a quantifier or a | in it")
            if any(int(number) > NAME for number in re.findall(r"\d+", text)):
                raise ValueError(f"{text} is more than {NAME} times")
            if re.fullmatch(r"\{\d+\}", text):
                continue  # an exact number of times is no choice
            quantifiers += 1
            choices += 1
    branches *= opened[0][1]
    return found, math.comb(NAME + quantifiers, quantifiers) * branches

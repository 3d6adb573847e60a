"""Compiles third parties' regular expressions, unless matching could take very long.

Python's `re` tries one way to match after another, and a short pattern may have more ways than can
ever be tried: `(a+)+b`, or `a?` many times. Nothing interrupts a match, so a limit on time would
not help, and a limit on length would allow these patterns. Therefore the ways are counted
beforehand, from the pattern's text. A character that has no special meaning where it stands, as in
`[*]`, may count, too: there are never more ways than counted.
"""

import math
import re

NAME = 48  # characters; the names of projections are shorter
MOST_WAYS = 4_000_000  # to match a name by all patterns of a file: tried in a fraction of a second
# The count bounds neither repeated groups nor a part that is repeated a hundred times. In verbose
# patterns there may be spaces between a group and its quantifier.
UNBOUNDED = re.compile(r"\)[*+{]|\{[\d,]*\d{3}|\(\?[a-zA-Z-]*x")
QUANTIFIER = re.compile(r"[*+?][?+]?|\{")


def compile_bounded(pattern: str) -> tuple[re.Pattern[str], int]:
    """A pattern, and in how many ways at most it can match; ValueError if it is not supported.

    A quantifier chooses where its part of a name ends, and these places follow one another, so that
    q quantifiers have NAME + q over q choices. A group chooses one of its branches.
    """
    try:
        found = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if unbounded := UNBOUNDED.search(pattern):
        raise ValueError(f"with {unbounded[0]!r} in it, it could take very long")
    quantifiers = len(QUANTIFIER.findall(pattern.replace("(?", "(")))
    branches = math.prod(1 + part.count("|") for part in re.split("[()]", pattern))
    return found, math.comb(NAME + quantifiers, quantifiers) * branches

"""Text from elsewhere, made safe to print.

A terminal obeys control characters: ESC and the C1 codes can move the cursor, change the title, or
make the terminal answer as if the user had typed. Bidirectional embeddings, overrides and isolates
reorder the characters of a line, so that it reads as another one. Text that a model generated, or
from somebody else's files, may contain any of them. `printable` shows them as Python escapes: ESC
as \\x1b.
"""

from collections.abc import Collection, Sequence

CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\t"), ord("\n")}  # C0, DEL and C1
SEPARATORS = {0x2028, 0x2029}  # of lines and paragraphs
BIDIRECTIONAL = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
SURROGATES = {*range(0xD800, 0xE000)}  # if alone, no encoding can print them
UNSAFE = CONTROLS | SEPARATORS | BIDIRECTIONAL | SURROGATES
ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in UNSAFE}


def printable(text: str) -> str:
    """Replaces all unsafe characters, those of `UNSAFE`, by escapes."""
    return text.translate(ESCAPES)


def amount(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 document", "2,000 documents"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(lines: Sequence[Sequence[str]], words: Collection[int] = (0,)) -> str:
    """Aligns cells in columns that are as wide as their widest cell.

    Args:
        lines: of cells.
        words: the columns that are aligned to the left; numbers are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def aligned(column: int, cell: str) -> str:
        return cell.ljust(widths[column]) if column in words else cell.rjust(widths[column])

    return "\n".join(
        "  ".join(aligned(column, cell) for column, cell in enumerate(line)).rstrip()
        for line in lines
    )

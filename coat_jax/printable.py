"""Text from elsewhere, made safe to print.

A terminal obeys control characters: ESC and the C1 codes can move the cursor, change the title, or
make the terminal answer as if the user had typed. Text that a model generated, or from somebody
else's files, may contain any of them. `printable` shows them as Python escapes: ESC as \\x1b.
"""

# C0 without tab and newline, DEL, C1, and lone surrogates, which no encoding can print.
UNSAFE = {*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000)} - {ord("\t"), ord("\n")}
ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in UNSAFE}


def printable(text: str) -> str:
    """The text with every control character but tab and newline shown as an escape."""
    return text.translate(ESCAPES)


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 document", "2,000 documents"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

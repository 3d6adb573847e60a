"""Compares the pages with the results files; `--write` corrects the pages."""

import difflib
import sys

from experiments import published
from experiments.command import bare_parser_of
from experiments.published.pages import PAGES, ROOT, corrected


def main() -> None:
    """Prints the lines that differ, and ends with 1 if there are any and they stay so."""
    parser = bare_parser_of(published.__doc__)
    parser.add_argument("--write", action="store_true", help="correct the pages")
    options = parser.parse_args()
    differs = False
    for page in PAGES:
        before = page.read_text()
        after = corrected(before)
        if options.write:
            page.write_text(after)
        else:
            name = str(page.relative_to(ROOT))
            lines = difflib.unified_diff(
                before.splitlines(), after.splitlines(), name, "its results", n=0, lineterm=""
            )
            for line in lines:
                print(line)
                differs = True
    sys.exit(differs)


if __name__ == "__main__":
    main()

"""Compares every page with the declared figures; `--write` corrects the pages."""

import argparse
import sys

from experiments import figures
from experiments.figures import pages
from experiments.figures.given import GIVEN
from experiments.figures.sentences import SENTENCES
from experiments.figures.tables import TABLES


def main() -> None:
    """Prints what is wrong, and ends with 1 if anything is and stays so."""
    parser = argparse.ArgumentParser(
        description=figures.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="correct the pages")
    options = parser.parse_args()
    errors = []
    for page in pages.names():
        path = pages.ROOT / page
        before = path.read_text()
        text, wrong = pages.compare(page, before, SENTENCES, TABLES, GIVEN)
        if options.write and text != before:
            path.write_text(text)
            print(f"{page}: corrected")
            _, wrong = pages.compare(page, text, SENTENCES, TABLES, GIVEN)
        errors += wrong
    print("\n".join(errors or ["Every figure agrees with what it comes from."]))
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()

"""Compares every page with the declared figures; `--write` corrects the pages."""

import sys

from experiments import figures
from experiments.command import bare_parser_of
from experiments.figures.compare import ROOT, compare
from experiments.figures.gpus import unnamed
from experiments.figures.measured.files import device
from experiments.figures.pages import all_pages


def main() -> None:
    """Prints what is wrong, and ends with 1 if anything is and stays so."""
    parser = bare_parser_of(figures.__doc__)
    parser.add_argument("--write", action="store_true", help="correct the pages")
    options = parser.parse_args()
    errors = []
    for page in all_pages():
        path = ROOT / page.name
        before = path.read_text()
        text, wrong = compare(page, before)
        if options.write and text != before:
            path.write_text(text)
            print(f"{page.name}: corrected")
            _, wrong = compare(page, text)
        errors += wrong + [f"{page.name}: {error}" for error in unnamed(text, device)]
    print("\n".join(errors or ["Every figure agrees with what it comes from."]))
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()

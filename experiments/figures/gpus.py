"""The kinds of GPU that a paragraph names, compared with those that its results files are of."""

import re
from collections.abc import Callable, Iterator

KINDS = ("H100", "H200")
RESULTS = re.compile(r"experiments/results/(\w+)\.json")


def unnamed(text: str, device_of: Callable[[str], str]) -> Iterator[str]:
    """What is wrong with the paragraphs of a page that name GPUs and link to results.

    A paragraph may name more kinds of GPU than its results are of: those of another measurement.

    Args:
        text: of the page. Tables of results have columns for the hardware, and are left out.
        device_of: the device of a results file.

    >>> list(unnamed("On an H100 ([speed](experiments/results/speed.json)).", lambda _: "H200"))
    ['names H100, but speed.json is of an H200']
    """
    for paragraph in re.split(r"\n\s*\n", text):
        named = [kind for kind in KINDS if kind in paragraph]
        if not named or paragraph.lstrip().startswith(("|", "<!-- table")):
            continue
        for file in dict.fromkeys(RESULTS.findall(paragraph)):
            measured = [kind for kind in KINDS if kind in device_of(file)]
            for kind in measured:
                if kind not in named:
                    yield f"names {' and '.join(named)}, but {file}.json is of an {kind}"

"""For mkdocs: files of the repository that pages link to become part of the site.

Pages link to them as `../experiments/results/x.json`, which is right where the repository is
browsed. In the site the same file is `repository/experiments/results/x.json`.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()\.\./([^)#\s]+)")
PLACE = "repository"


def on_files(files: Files, config: Any) -> Files:
    """Adds the files that pages link to."""
    pages = [Path(page.abs_src_path) for page in files.documentation_pages()]
    linked = {path for page in pages for _, path in LINK.findall(page.read_text("utf-8"))}
    for path in sorted(linked):
        if not (ROOT / path).is_file():
            raise FileNotFoundError(f"A page links to {path}, which is no file of the repository.")
        source = str(ROOT / path)
        files.append(File.generated(config, f"{PLACE}/{path}", abs_src_path=source))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Points links to them."""
    return LINK.sub(rf"\1{PLACE}/\2", markdown)

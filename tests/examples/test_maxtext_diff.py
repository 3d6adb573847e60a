"""The change to MaxText that docs/maxtext.diff proposes fits the MaxText that is installed."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

DIFF = Path(__file__).parents[2] / "docs" / "maxtext.diff"


@pytest.mark.examples
def test_the_diff_applies_to_maxtext(tmp_path: Path) -> None:
    """In its repository the package lies in src/."""
    package = find_spec("maxtext")
    if package is None:
        pytest.skip("needs maxtext")
    (installed,) = package.submodule_search_locations
    names = re.findall(r"^--- a/src/maxtext/(.*)$", DIFF.read_text(), re.M)
    assert names
    for name in names:
        copy = tmp_path / "src" / "maxtext" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(installed) / name, copy)
    applied = subprocess.run(
        ["git", "apply", "--check", str(DIFF)],
        # Within a repository, git would leave out files that are not of that folder.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert applied.returncode == 0, applied.stderr

"""Where the figures come from: the last table of docs/benchmarks.md."""

from experiments.figures.compare import Figure, Sentence, Table
from experiments.figures.measured.files import FOLDER, parents

MOST = "6f9a4a"  # the code of coat_jax that most files are of


def names() -> list[str]:
    """All results files."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def of_code(code: str) -> int:
    """How many files are of a version of coat_jax."""
    return sum(parents(name).get("code", "").startswith(code) for name in names())


def rows() -> list[list[str]]:
    """What each results file says of itself."""
    rows = [["results", "script", "commit", "code", "hardware", "date"]]
    for name in names():
        made = parents(name)
        hardware = made["hardware"]
        several = f"{hardware['devices']} x " if hardware["devices"] > 1 else ""
        script = made["script"].removeprefix("experiments/").removesuffix(".py")
        rows.append(
            [
                f"[{name}](../experiments/results/{name}.json)",
                f"`{script}`",
                f"`{made['commit'][:9]}`",
                f"`{made['code'][:6]}`" if "code" in made else "",
                several + hardware["device"].replace("cpu", "CPU"),
                made["date"],
            ]
        )
    return rows


FIGURES: list[Figure] = [
    Sentence(
        f"Of the {{}} results files, {{}} are of one code of coat_jax, `{MOST}`.",
        lambda: (len(names()), of_code(MOST)),
    ),
    Table("parents", rows),
]

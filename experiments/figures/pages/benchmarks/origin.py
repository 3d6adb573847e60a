"""Where the figures come from: the last table of docs/benchmarks.md."""

from experiments.figures.compare import Figure, Table
from experiments.figures.measured.files import FOLDER, parents


def rows() -> list[list[str]]:
    """What each results file says of itself."""
    rows = [["results", "script", "commit", "hardware", "date"]]
    for name in sorted(path.stem for path in FOLDER.glob("*.json")):
        made = parents(name)
        hardware = made["hardware"]
        several = f"{hardware['devices']} x " if hardware["devices"] > 1 else ""
        script = made["script"].removeprefix("experiments/").removesuffix(".py")
        rows.append(
            [
                f"[{name}](../experiments/results/{name}.json)",
                f"`{script}`",
                f"`{made['commit'][:9]}`",
                several + hardware["device"].replace("cpu", "CPU"),
                made["date"],
            ]
        )
    return rows


FIGURES: list[Figure] = [Table("parents", rows)]

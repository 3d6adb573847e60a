"""How loose bounds of magnitudes are, and what they cost: bound_looseness."""

from experiments.figures.measured.files import of

NORM, GRADIENTS = "norm's output", ("gradient of gate", "gradient of up")
AS_TRAINED, EXTREME = "as trained", "norm's scale times 1000"
MOST = 1e-3  # by how much an error may grow that a bound is said not to change


def looseness_of_gradients() -> tuple[float, float]:
    """How many times too large a bound of a gradient is at most: as trained, and with outliers.

    Raises if a bound costs accuracy where docs/benchmarks.md says that none does.
    """
    costly = {
        (name, case)
        for name, cases in of("bound_looseness")["bounded"].items()
        for case in cases
        if growth(name, case) > MOST
    }
    if costly != {(NORM, EXTREME)}:
        raise ValueError(f"Bounds cost accuracy: {costly}. See docs/benchmarks.md.")
    loosest = {
        (name, case): 2 ** found["loosest"]
        for name in GRADIENTS
        for case, found in of("bound_looseness")["bounded"][name].items()
    }
    return max(loosest[name, AS_TRAINED] for name in GRADIENTS), max(loosest.values())


def growth(name: str, case: str) -> float:
    """By how much the scale from a bound increases the error, relative to an exact one."""
    found = of("bound_looseness")["bounded"][name][case]
    return found["error, bound"] / found["error, largest"] - 1


def extreme_norm() -> tuple[float, float, float]:
    """With columns 1000 times larger: small values in percent with either scale, and the growth."""
    found = of("bound_looseness")["bounded"][NORM][EXTREME]
    small = (100 * found[f"small, {scaled_by}"] for scaled_by in ("bound", "largest"))
    return *small, 100 * growth(NORM, EXTREME)


def rows() -> list[list[str]]:
    """Looseness, shares and errors by what is rounded and by outliers."""
    pairs = [(key, scaled_by) for key in ("small", "error") for scaled_by in ("bound", "largest")]
    titles = {"small": "subnormal or zero", "error": "error", "largest": "exact scale"}
    columns = [f"{titles[key]}, {titles.get(by, by)}" for key, by in pairs]
    table = [["rounded", "outliers", "log2(bound / largest)", *columns]]
    for name, cases in of("bound_looseness")["bounded"].items():
        for case, found in cases.items():
            values = (100 * found[f"{key}, {scaled_by}"] for key, scaled_by in pairs)
            cells = [f"{value:.2f} %" for value in values]
            table.append([name, case, f"{found['looseness']:.1f}", *cells])
    return table

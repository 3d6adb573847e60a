"""What Llama-2-7B takes, and what becomes of a run that loses a process."""

from experiments.published.results import GB, case, of

FILE = "training_throughput"


def recipe() -> list[list[str]]:
    """What Llama-2-7B takes of each of several GPUs, and how fast it trains."""
    one = case(FILE, precision="COAT", batch=16, offloaded=False, released=False)
    measured = {1: (one["peak"], one["tokens_per_second"])}
    for gpus in (2, 4):
        found = case(f"{FILE}_{gpus}_gpus_beside_one", precision="COAT", batch=16)
        measured[gpus] = found["memory"]["peak"], found["tokens_per_second"]
    rows = [["GPUs", "8 sequences each, GB", "16 sequences each, GB", "tokens/s with 16 each"]]
    for gpus in (1, 2, 4):
        many, speed = measured[gpus]
        rows.append([f"{gpus}", _planned(gpus, 8), f"{many / GB:.1f}", f"{speed:,.0f}"])
    return [*rows, ["8", _planned(8, 8), _planned(8, 16), "not measured"]]


def released_memory() -> list[list[str]]:
    """The peak of a step with its gradients kept and released, by batch."""
    figures = of("released_memory")
    rows = [["sequences", "activations, GB", "peak, GB", "peak with released gradients, GB"]]
    for kept, released in zip(figures["kept"], figures["released"], strict=True):
        sizes = kept["activations"], kept["peak"], released["peak"]
        batch = f"{kept['batch']} x {kept['sequence']}"
        rows.append([batch, *(f"{size / GB:.1f}" for size in sizes)])
    return rows


def lost_process() -> str:
    """By how much losses differ, relatively, after fewer processes went on with a run."""
    return f"{of('lost_process')['after']:.0e}"


def gradients() -> str:
    """GB that all gradients of Llama-2-7B take."""
    return f"{of('released_memory')['kept'][0]['gradients'] / GB:.1f}"


def offloading(released: str = "") -> str:
    """By how many percent a step is longer with moments in host memory.

    With "released" gradients, or without.
    """
    on_gpu, offloaded = (
        case(FILE, precision="COAT", batch=16, offloaded=moved, released=bool(released))
        for moved in (False, True)
    )
    longer = 100 * (offloaded["step_seconds"] / on_gpu["step_seconds"] - 1)
    return f"{longer:.1f}" if released else f"{longer:.0f}"


def _planned(gpus: int, sequences: int) -> str:
    """GB of each GPU by XLA's account of the step."""
    return f"{case('recipe_memory', gpus=gpus, rows=sequences)['peak'] / GB:.1f}"

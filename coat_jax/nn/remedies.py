"""Adds to a plan how many bytes each module saves, and how it could save less."""

import contextlib
import re

from flax import nnx

from coat_jax.nn.bytes_saved import Saved, bytes_of
from coat_jax.nn.children import modules_of
from coat_jax.nn.converted_mlp import MLPS, roles_of
from coat_jax.nn.plan import Decision, Plan

BETWEEN = "it computes between its modules"
RAISED = (
    "The conversion raises what is saved: layers that read the same array save a copy of it each, "
    "in FP8. coat.nn.Attention, coat.nn.GatedMLP and coat.ops.norm_linear save one copy for all."
)
SMALL = 0.01  # a smaller share of all saved bytes needs no remedy


def add_counts(plan: Plan, model: nnx.Module, before: Saved, after: Saved) -> Plan:
    """Returns the plan with all modules that save bytes, how many, and what could save less.

    Args:
        plan: the decisions.
        model: the model that the plan is for.
        before: what its modules save.
        after: what they save after the conversion.
    """
    decided = {decision.path: decision for decision in plan}
    replaced = tuple(f"{decision.path}." for decision in plan if decision.roles is not None)
    old, new = (sum(map(bytes_of, saved.values())) for saved in (before, after))
    saving = before.keys() | after.keys()
    result = Plan()
    for path, module in modules_of(model):
        if path.startswith(replaced) or not (path in decided or path in saving):
            continue
        unchanged = path, type(module).__name__, None, BETWEEN, f"unchanged: {BETWEEN}"
        decision = decided.get(path, Decision(*unchanged))
        below = f"{path}."  # an op counts what its layers saved
        mine = [p for p in saving if p == path or (below in replaced and p.startswith(below))]
        count, count_after = (
            sum(bytes_of(saved.get(p, [])) for p in mine) for saved in (before, after)
        )
        remedy, wide = "", bytes_of(after.get(path, []), above=1)
        if decision.reason == BETWEEN and wide > SMALL * new:
            remedy = _remedy(path, module, wide)
        elif new > old and count_after > count:
            remedy = RAISED
        result.append(decision._replace(before=count, after=count_after, remedy=remedy))
    return result


def _remedy(path: str, module: nnx.Module, size: int) -> str:
    """How to save less than `size` bytes of what a module computes between its modules."""
    glob = re.sub(r"\b\d+\b", "*", path)
    for kind, name in MLPS.items():
        with contextlib.suppress(ValueError):
            if path and roles_of(module, kind):
                return f'{glob} saves less as one op. Add to the rules: {{"{glob}": {name}}}.'
    saves = f"{glob or 'The model'} saves {size:,} bytes with more than 8 bits per element"
    if isinstance(module, nnx.MultiHeadAttention):
        return (
            f"{saves}. Without masks and dropout, build it with "
            "attention_fn=coat.nn.attention_fn()."
        )
    return (
        f"{saves}, from what it computes between its modules. Use functions of coat.ops there, "
        "such as activate and attention, or wrap it in coat.ops.recompute."
    )

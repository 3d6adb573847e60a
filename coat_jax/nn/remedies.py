"""Adds to a plan how many bytes each module saves, and how it could save less."""

import re

from flax import nnx

from coat_jax.nn.bytes_saved import Saved
from coat_jax.nn.children import children
from coat_jax.nn.plan import Decision, Plan
from coat_jax.nn.rules import MLPS, suggest_kind

BETWEEN = "it computes between its modules"
RAISED = (
    "The conversion raises what is saved: layers that read the same array save a copy of it each, "
    "in FP8. coat.nn.Attention, coat.nn.GatedMLP and coat.ops.norm_linear save one copy for all."
)
SMALL = 0.01  # a smaller share of all saved bytes needs no remedy

SavedBy = dict[str, Saved]


def add_counts(plan: Plan, model: nnx.Module, before: SavedBy, after: SavedBy) -> Plan:
    """Returns the plan with all modules that save bytes, how many, and what could save less.

    Args:
        plan: the decisions.
        model: the model that the plan is for.
        before: what its modules save.
        after: what they save after the conversion.
    """
    decided = {decision.path: decision for decision in plan}
    replaced = tuple(f"{decision.path}." for decision in plan if decision.roles is not None)
    raises = sum(s.bytes for s in after.values()) > sum(s.bytes for s in before.values())
    result = Plan()
    for path, module in [("", model), *((path, module) for _, _, path, module in children(model))]:
        decision = decided.get(path)
        if decision is None:
            if path.startswith(replaced) or not {path} & (before.keys() | after.keys()):
                continue
            decision = Decision(path, type(module).__name__, None, BETWEEN)
        inside = decision.roles is not None
        counts = _bytes_of(before, path, inside), _bytes_of(after, path, inside)
        remedy, wide = "", after[path].wide_bytes if path in after else 0
        if decision.reason == BETWEEN and wide > SMALL * sum(s.bytes for s in after.values()):
            remedy = _remedy(path, module, wide)
        elif raises and counts[1] > counts[0]:
            remedy = RAISED
        result.append(decision._replace(before=counts[0], after=counts[1], remedy=remedy))
    return result


def _bytes_of(saved: SavedBy, path: str, inside: bool) -> int:
    """The bytes of a module, and of those inside of it if asked for."""
    return sum(
        s.bytes for p, s in saved.items() if p == path or (inside and p.startswith(f"{path}."))
    )


def _remedy(path: str, module: nnx.Module, size: int) -> str:
    """How to save less than `size` bytes of what a module computes between its modules."""
    glob, kind = re.sub(r"\b\d+\b", "*", path), suggest_kind(module)
    if kind is not None and not path:
        return f"The model is a {MLPS[kind]}: build it as one."
    if kind is not None:
        return f'{glob} saves less as one op. Add to the rules: {{"{glob}": {MLPS[kind]}}}.'
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

"""Adds to a plan how many bytes each module saves, and how it could save less."""

import re
from collections.abc import Callable

from flax import nnx

from coat_jax.nn.bytes_saved import Saved
from coat_jax.nn.children import children
from coat_jax.nn.converted_mlp import MLPClass
from coat_jax.nn.plan import Decision, Plan
from coat_jax.nn.rules import MLPS, suggested_kind

BETWEEN = "it computes between its modules"
RAISED = (
    "The conversion raises what is saved: layers that read the same array save a copy of it each, "
    "in FP8. coat.nn.Attention, coat.nn.GatedMLP and coat.ops.norm_linear save one copy for all."
)
SMALL = 0.01  # a smaller share of all saved bytes needs no remedy

SavedBy = dict[str, Saved]


def with_counts(plan: Plan, model: nnx.Module, before: SavedBy, after: SavedBy) -> Plan:
    """The plan with the bytes that each module saves, and with every module that saves any."""
    decided = {decision.path: decision for decision in plan}
    replaced = tuple(f"{decision.path}." for decision in plan if decision.roles is not None)
    result = Plan()
    for path, module in _modules(model).items():
        decision = decided.get(path)
        if decision is None:
            if path.startswith(replaced) or not {path} & (before.keys() | after.keys()):
                continue
            decision = Decision(path, type(module).__name__, None, BETWEEN)
        count = _bytes_within if decision.roles is not None else _bytes_of
        result.append(decision._replace(before=count(before, path), after=count(after, path)))
    return result


def with_remedies(
    plan: Plan, model: nnx.Module, after: SavedBy, best: Callable[[dict[str, MLPClass]], SavedBy]
) -> Plan:
    """The plan with a remedy for each module that saves much of what it computes between modules.

    Args:
        plan: from `with_counts`.
        model: the model that the plan is for.
        after: what the modules save after the conversion.
        best: a function from paths that also become MLPs to what the modules then save.
    """
    modules = _modules(model)
    total = sum(saved.bytes for saved in after.values())
    wide = {
        decision.path: after[decision.path].wide_bytes
        for decision in plan
        if decision.reason == BETWEEN
        and decision.path in after
        and after[decision.path].wide_bytes > SMALL * total
    }
    kinds = {path: suggested_kind(modules[path]) for path in wide}
    mlps = {path: kind for path, kind in kinds.items() if path and kind is not None}
    saved = best(mlps) if mlps else after
    more = {d.path: (d.after or 0) - (d.before or 0) for d in plan}
    remedies = {path: RAISED for path in more if sum(more.values()) > 0 and more[path] > 0}
    for path, size in wide.items():
        glob = re.sub(r"\b\d+\b", "*", path)
        if path in mlps:
            now, then = _bytes_within(after, path), _bytes_within(saved, path)
            remedies[path] = (
                f"{glob} would save {then:,} bytes instead of {now:,} as one op. "
                f'Add to the rules: {{"{glob}": {MLPS[mlps[path]]}}}.'
            )
        elif (kind := kinds[path]) is not None:
            remedies[path] = f"The model is a {MLPS[kind]}: build it as one."
        elif isinstance(modules[path], nnx.MultiHeadAttention):
            remedies[path] = (
                f"{glob or 'The model'} saves {size:,} bytes with more than 8 bits per element. "
                "Without masks and dropout, build it with attention_fn=coat.nn.attention_fn()."
            )
        else:
            remedies[path] = (
                f"{glob or 'The model'} saves {size:,} bytes with more than 8 bits per element, "
                "from what it computes between its modules. Use functions of coat.ops there, such "
                "as activate and attention, or wrap it in coat.ops.recompute."
            )
    return Plan(d._replace(remedy=remedies.get(d.path, "")) for d in plan)


def _modules(model: nnx.Module) -> dict[str, nnx.Module]:
    return {"": model, **{path: module for _, _, path, module in children(model)}}


def _bytes_of(saved: SavedBy, path: str) -> int:
    return saved[path].bytes if path in saved else 0


def _bytes_within(saved: SavedBy, path: str) -> int:
    """The bytes of a module and of those within it."""
    return sum(s.bytes for p, s in saved.items() if p == path or p.startswith(f"{path}."))

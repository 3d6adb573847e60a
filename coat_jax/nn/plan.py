"""The plan of a conversion: what becomes of each module, by its class and by rules for its path."""

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from coat_jax.nn.children import has_own_parameters, modules_of
from coat_jax.nn.converted_mlp import MLPS, MLPClass, Roles, roles_of
from coat_jax.nn.convertible import formats_of, why_not
from coat_jax.precision import Precision, precision_of
from coat_jax.printable import table
from coat_jax.validation import brief

Rules = Mapping[str, Precision | str | MLPClass]

THE_MODEL = "(the model)"  # shown instead of its path, which is empty


class Decision(NamedTuple):
    """The decision on one module.

    Attributes:
        path: the path of the module; "" for the model itself.
        kind: the name of its class.
        precision: its new precision; None if the module stays unchanged.
        reason: why it stays unchanged; empty if it does not.
        becomes: what the module becomes.
        rule: the rule that matched it; None if none did.
        roles: what its layers are for, if the module becomes a GatedMLP or an MLP.
        before: bytes that it saves for its backward pass; None if the plan was made without inputs.
        after: the same after the conversion.
        remedy: what would save less memory; empty if nothing is known.
    """

    path: str
    kind: str
    precision: Precision | None
    reason: str
    becomes: str
    rule: str | None = None
    roles: Roles | None = None
    before: int | None = None
    after: int | None = None
    remedy: str = ""


class Plan(list[Decision]):
    """The decisions on a model's modules; `print` shows them as a table."""

    def __str__(self) -> str:
        """A line for each module, the total of saved bytes, and the remedies.

        The bytes are counted only if `plan_conversion` was given the model's inputs.
        """
        counted = any(decision.before is not None for decision in self)
        rows = [("module", "class", *(("saves", "after") if counted else ()), "becomes")]
        for decision in self:
            sizes = _sizes([decision]) if counted else ()
            rows.append((decision.path or THE_MODEL, decision.kind, *sizes, decision.becomes))
        notes = dict.fromkeys(decision.remedy for decision in self if decision.remedy)
        if counted:
            rows.append(("total", "", *_sizes(self), ""))
        else:
            notes["To see what modules save, give the shapes of the inputs: inputs=..."] = None
        return "\n".join([table(rows, (0, 1, len(rows[0]) - 1)), *(f"\n{note}" for note in notes)])


def _sizes(decisions: list[Decision]) -> tuple[str, str]:
    """The bytes that modules save, before and after the conversion."""
    before, after = zip(*((d.before or 0, d.after or 0) for d in decisions), strict=True)
    return f"{sum(before):,}", f"{sum(after):,}"


def decide(model: nnx.Module, precision: Precision, rules: Rules) -> Plan:
    """A decision for each module with parameters of its own, or that a rule turns into an MLP."""
    if not isinstance(rules, Mapping):
        raise TypeError(f'rules are a dict, such as {{"*.head": "bf16"}}, not {brief(rules)}.')
    given: dict[str, Any] = dict(rules)
    settings = {
        g: v if isinstance(v, type) and v in MLPS else precision_of(v) for g, v in given.items()
    }
    plan, paths, replaced = Plan(), [], None
    known: dict[Any, Roles] = {}
    decided: dict[int, Decision] = {}
    for path, module in modules_of(model):
        own = has_own_parameters(module)
        if path or own:
            paths.append(path)
        if not (path or own) or (replaced is not None and path.startswith(f"{replaced}.")):
            continue
        rule = next((glob for glob in settings if fnmatch.fnmatchcase(path, glob)), None)
        setting = precision if rule is None else settings[rule]
        kind, formats = type(module).__name__, formats_of(module, precision)
        if not isinstance(setting, Precision):
            roles = _required_roles(path, module, setting, rule, known)
            becomes = f"{formats}, as one op: {roles}"
            plan.append(Decision(path, kind, precision, "", becomes, rule, roles))
            replaced = path
        elif own:
            source = "its precision" if rule is None else f"its precision, by the rule {rule!r},"
            reason = why_not(module, setting, source)
            becomes = f"unchanged: {reason}" if reason else formats_of(module, setting)
            chosen = None if reason else setting
            plan.append(Decision(path, kind, chosen, reason, becomes, rule))
            _require_agreement(plan[-1], decided.setdefault(id(module), plan[-1]))
    for glob in settings:
        _require_match(glob, paths)
    return plan


def _require_agreement(decision: Decision, first: Decision) -> None:
    """Raises where rules decide differently on one module that has two paths."""
    if decision.precision != first.precision:
        by_rule = decision.rule or first.rule
        raise ValueError(
            f"{decision.path} and {first.path} are the same module, and the rule {by_rule!r} is "
            "for only one of them. Name both paths in the rules, with the same precision."
        )


def _required_roles(
    path: str, module: nnx.Module, kind: MLPClass, rule: str | None, known: dict[Any, Roles]
) -> Roles:
    """`roles_of` a module that a rule names; equal modules are tried only once."""
    graph, state = nnx.split(module)
    key = kind, graph, tuple(leaf.shape for leaf in jax.tree.leaves(state))
    try:
        if key not in known:
            known[key] = roles_of(module, kind)
        return known[key]
    except ValueError as error:
        raise ValueError(
            f"The rule {rule!r} says that {path} ({type(module).__name__}) computes what "
            f"{MLPS[kind]} does, but {error}. Narrow the rule, or build the module with "
            f"{MLPS[kind]}."
        ) from error


def _require_match(glob: str, paths: list[str]) -> None:
    if not fnmatch.filter(paths, glob):
        near = difflib.get_close_matches(glob, paths, 3, 0.3) or sorted(paths)[:3]
        example = near[0].rpartition(".")[2] if near else "head"
        raise ValueError(
            f"No module matches the rule {glob!r}. Rules are globs of whole paths, such as "
            f"'*.{example}'. The model has {near}."
        )

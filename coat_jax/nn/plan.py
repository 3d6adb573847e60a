"""The plan of a conversion: a decision on each module of a model, as data and as a table."""

from typing import NamedTuple

from coat_jax.nn.converted_mlp import Roles
from coat_jax.precision import Precision
from coat_jax.printable import table

THE_MODEL = "(the model)"  # shown instead of its path, which is empty


class Decision(NamedTuple):
    """The decision on one module.

    Attributes:
        path: the path of the module; "" for the model itself.
        kind: the name of its class.
        precision: its new precision; None if the module stays unchanged.
        reason: why it stays unchanged; empty if it does not.
        rule: the rule that matched it; None if none did.
        roles: what its layers are for, if the module becomes a GatedMLP or an MLP.
        before: bytes that it saves for its backward pass; None if the plan was made without inputs.
        after: the same after the conversion.
        remedy: what would save less memory; empty if nothing is known.
        becomes: what the module becomes, if it has a new precision.
    """

    path: str
    kind: str
    precision: Precision | None
    reason: str
    rule: str | None = None
    roles: Roles | None = None
    before: int | None = None
    after: int | None = None
    remedy: str = ""
    becomes: str = "FP8"


class Plan(list[Decision]):
    """The decisions on a model's modules; `print` shows them as a table."""

    def __str__(self) -> str:
        """A line for each module, the total of saved bytes, and the remedies.

        The bytes are counted only if `plan_conversion` was given the model's inputs.
        """
        counted = any(decision.before is not None for decision in self)
        rows = [("module", "class", *(("saves", "after") if counted else ()), "becomes")]
        for decision in self:
            sizes = (_bytes(decision.before), _bytes(decision.after)) if counted else ()
            rows.append((decision.path or THE_MODEL, decision.kind, *sizes, _becomes(decision)))
        if counted:
            before = sum(decision.before or 0 for decision in self)
            after = sum(decision.after or 0 for decision in self)
            rows.append(("total", "", _bytes(before), _bytes(after), ""))
        notes = dict.fromkeys(decision.remedy for decision in self if decision.remedy)
        if not counted:
            notes["To see what modules save, give the shapes of the inputs: inputs=..."] = None
        shown = table(rows, words=(0, 1, len(rows[0]) - 1))
        return "\n".join([shown, *(f"\n{note}" for note in notes)])


def _becomes(decision: Decision) -> str:
    if decision.precision is None:
        return f"unchanged: {decision.reason}"
    if decision.roles is None:
        return decision.becomes
    return f"{decision.becomes}, as one op: {_op(decision.roles)}"


def _op(roles: Roles) -> str:
    if roles.gate:
        return f"{roles.down}({roles.activation}({roles.gate}) * {roles.up})"
    return f"{roles.down}({roles.activation}({roles.up}))"


def _bytes(count: int | None) -> str:
    return "" if count is None else f"{count:,}"

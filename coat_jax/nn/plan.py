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

"""`optax.chain` for the optimizers of this package: it refuses states that another chain made.

`optax.chain` compares only the number of states. A link without a state, such as a learning rate
that is a number, accepts any state; and the errors of the others do not mention the state.
"""

from typing import Any

import optax


def checked_chain(
    kind: type, first: optax.GradientTransformation, *others: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """`optax.chain`, whose update first checks the state.

    Args:
        kind: the class of the first link's state.
        first: the first link, which has the moments.
        others: the other links. Their `init` is called in each update, so it must be cheap.
    """
    chain = optax.chain(first, *others)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        like = updates if params is None else params
        expected = _joined([kind.__name__, *(_outline(link.init(like)) for link in others)])
        if _outline(state) != expected:
            raise TypeError(
                f"The state must be {expected}, but is {_outline(state)}. {_advice(kind, state)}"
            )
        return chain.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(chain.init, update)


def _advice(kind: type, state: Any) -> str:
    first = state[0] if type(state) in (tuple, list) and state else state
    if not isinstance(first, kind):
        return "Another optimizer made it. Make one with init(params)."
    name = kind.__name__
    return (
        "Another function made it, or the same one with other arguments: a schedule has a state "
        "and a number has none, and a mask adds one. Make one with init(params); to keep the "
        f"moments, put the old {name} into it, and its count into the states of schedules."
    )


def _outline(state: Any) -> str:
    """The classes of a chain's states, by name."""
    if type(state) in (tuple, list):
        return _joined([_outline(link) for link in state])
    if isinstance(state, optax.MaskedState):
        return f"MaskedState({_outline(state.inner_state)})"
    return "None" if state is None else type(state).__name__


def _joined(names: list[str]) -> str:
    return f"({', '.join(names)})"

"""What a function saves for its backward pass: bytes by name and dtype, counted without running it.

    print(coat.saved_bytes(loss, params, batch))

    name      saved in         arrays          bytes    in its own dtype
    hidden    float8_e4m3fn         8    561,020,928       1,056,964,608
    gate      not in 8 bits         8              0       1,056,964,608
              bfloat16              9    268,435,456         268,435,456

The named arrays are those of `coat.save_fp8`. One that no checkpoint saves in 8 bits is recomputed,
or among the others. In FP8 it would take 0.53 times its bytes in BF16.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from coat_jax.errors import UserError
from coat_jax.ops.saving import LABEL, SaveFP8, save_p

OTHERWISE = "not in 8 bits"


class Saved(NamedTuple):
    """Arrays of one name and dtype.

    Attributes:
        name: that of `coat.save_fp8`; empty for all other arrays.
        dtype: of the codes, or of the arrays; or `OTHERWISE`.
        arrays: how many there are. Those that a scan stacks count as one for each iteration.
        bytes: that they take, with scales.
        unrounded: what they take in their own dtype.
    """

    name: str
    dtype: str
    arrays: int
    bytes: int
    unrounded: int


class SavedBytes(tuple[Saved, ...]):
    """What is saved, by name and dtype; named arrays come first."""

    __slots__ = ()

    @property
    def total(self) -> int:
        """The bytes of all arrays."""
        return sum(saved.bytes for saved in self)

    def __str__(self) -> str:
        rows = [("name", "saved in", "arrays", "bytes", "in its own dtype")]
        rows += [(s.name, s.dtype, str(s.arrays), f"{s.bytes:,}", f"{s.unrounded:,}") for s in self]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "    ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def saved_bytes(function: Callable[..., Any], *args: Any) -> SavedBytes:
    """Counts the arrays that the gradient of `function(*args)` needs besides its arguments.

    Args:
        function: a function of trees of arrays, such as a loss. It is traced and does not run.
        *args: its arguments, or their `jax.ShapeDtypeStruct`s. All may be differentiated.

    Raises:
        UserError: if a checkpoint's policy names an array that is not in the checkpoint.
    """
    program = jax.make_jaxpr(function)(*args).jaxpr
    _require_names(program)
    named: dict[str, list[int]] = {}  # how many arrays, and their bytes in their own dtype
    for equation, times in _equations(program):
        if equation.primitive is save_p:
            counts = named.setdefault(equation.params["name"], [0, 0])
            counts[0] += times
            counts[1] += times * _bytes(equation.invars[0].aval)

    backward = jax.make_jaxpr(lambda *args: jax.vjp(function, *args)[1])(*args).jaxpr
    found: dict[tuple[str, str], list[int]] = {}
    for variable in {id(v): v for v in backward.outvars}.values():
        if variable in backward.invars or not variable.aval.shape:
            continue
        encoded = _encoded(backward, variable)
        if encoded is None:
            key, count = ("", variable.aval.dtype.name), 1
        else:
            key, shape = encoded
            # Of two arrays, one has the codes and the other one the scales.
            is_codes = variable.aval.dtype.name == key[1]
            count = is_codes * math.prod(variable.aval.shape) // math.prod(shape)
        counts = found.setdefault(key, [0, 0])
        counts[0] += count
        counts[1] += _bytes(variable.aval)

    saved = [
        Saved(name, dtype, count, size, named[name][1] if name else size)
        for (name, dtype), (count, size) in found.items()
    ]
    there = {name for name, _ in found}
    saved += [Saved(n, OTHERWISE, c[0], 0, c[1]) for n, c in named.items() if n not in there]
    return SavedBytes(sorted(saved, key=lambda s: (not s.name, s.dtype == OTHERWISE, -s.bytes)))


def _bytes(kind: Any) -> int:
    return int(math.prod(kind.shape) * kind.dtype.itemsize)


def _inner(equation: Any) -> list[Any]:
    """The programs inside an equation."""
    values = [
        item
        for value in equation.params.values()
        for item in (value if isinstance(value, tuple | list) else (value,))
    ]
    programs = [getattr(value, "jaxpr", value) for value in values]
    return [program for program in programs if hasattr(program, "eqns")]


def _equations(program: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """All equations, and how often each runs: as often as a scan has iterations."""
    for equation in program.eqns:
        yield equation, times
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in _inner(equation):
            yield from _equations(inner, length * times)


def _require_names(program: Any) -> None:
    """Raises if the policy of a checkpoint names an array that is not in it."""
    for equation, _ in _equations(program):
        policy = equation.params.get("policy")
        if not isinstance(policy, SaveFP8):
            continue
        inside = (e for inner in _inner(equation) for e, _ in _equations(inner))
        names = {e.params["name"]: None for e in inside if e.primitive is save_p}
        if unknown := [name for name in policy.names if name not in names]:
            raise UserError(
                f"A checkpoint's policy names {unknown[0]!r}, but no coat.save_fp8 in it has this "
                f"name: those there have {', '.join(map(repr, names)) or 'none'}."
            )


def _encoded(program: Any, variable: Any) -> tuple[tuple[str, str], tuple[int, ...]] | None:
    """Of codes or scales, the array's name, the codes' dtype, and the shape in one iteration."""
    for equation in program.eqns:
        if variable not in equation.outvars:
            continue
        label, _, rest = str(equation.params.get("name", "")).partition(" ")
        if label == LABEL:
            dtype, _, name = rest.partition(" ")
            return (name, dtype), variable.aval.shape
        position = equation.outvars.index(variable)
        for inner in _inner(equation):
            if len(inner.outvars) == len(equation.outvars):
                return _encoded(inner, inner.outvars[position])
    return None

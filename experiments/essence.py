"""What code does, without its words and layout: for hashes that change only where results may.

Comments, docstrings, imports, layout and the shapes in jaxtyping's annotations do not count, and
the essence of code is the same in every version of Python.
"""

import ast
import functools
import hashlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "coat_jax"


@functools.cache  # one row of results after another names the same code
def essence(source: str) -> str:
    """The syntax of a file, without comments, docstrings, and imports, which only say where."""
    return _written(_bare(source))


def parts(source: str) -> list[tuple[ast.stmt, str]]:
    """The statements of a file's top level that its essence has, each with its own."""
    return [(statement, _written(statement)) for statement in _bare(source).body]


def _bare(source: str) -> ast.Module:
    """A file without what does not count."""
    tree = ast.parse(source)
    _drop_shapes(tree)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                one
                for i, one in enumerate(body)
                if not isinstance(one, ast.Import | ast.ImportFrom) and not (i == 0 and _text(one))
            ]
    return tree


def code_hash() -> str:
    """A hash of what the package does, which neither its words nor other folders change."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        name, found = path.relative_to(ROOT).as_posix(), essence(path.read_text("utf-8"))
        digest.update(name.encode() + b"\0" + found.encode() + b"\0")
    return digest.hexdigest()[:16]


def _drop_shapes(tree: ast.Module) -> None:
    """Leaves the shape out of Float[Array, "B T"], and of the other types of jaxtyping."""
    types = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping"
        for name in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", None) in types:
            match node.slice:
                case ast.Tuple(elts=[_, ast.Constant(value=str()) as shape]):
                    shape.value = ""


def _text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _written(node: Any) -> str:
    """As `ast.dump`, but without empty fields: some versions of Python have more of them."""
    if isinstance(node, ast.JoinedStr):  # some versions add an empty part to formats
        node.values = [one for one in node.values if getattr(one, "value", None) != ""]
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node))
        shown = [f"{name}={_written(value)}" for name, value in fields if value not in (None, [])]
        return f"{type(node).__name__}({', '.join(shown)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_written, node))}]"
    return repr(node)

"""The architecture, held in place: imports only go downwards, and `import coat_jax` is light.

LAYERS is the table in docs/architecture.md from its last row to its first, with some rows divided
or joined; INSIDE has the same for the folders whose parts have an order of their own. A part may
import parts of the lines above its own; those that share a line do not know each other. Inside any
other folder anything goes but a cycle. Imports count wherever they stand, also inside functions and
under TYPE_CHECKING.
"""

import ast
import functools
import graphlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import coat_jax

PACKAGE = Path(coat_jax.__file__).parent
LAYERS = [
    ("errors", "printable"),
    ("validation",),
    ("files", "multihost", "numerics", "writing"),
    ("manifest", "precision", "storage", "tokenizers"),
    ("probes",),
    ("kernels",),
    ("ops",),
    ("nn", "linen", "optax", "residuals", "telemetry"),
    ("models",),
    ("quantization",),
    ("generation", "evaluation"),
    ("training",),
    ("",),  # coat_jax/__init__.py
    ("cli",),
    ("__main__",),
]
INSIDE = {
    "coat_jax": LAYERS,
    "coat_jax.numerics": [
        ("mesh_axes", "minifloat", "one_program"),
        ("corrections", "explicit_axes", "formats", "groups", "noise"),
        ("blocks", "expansion", "four_bits", "quantizer"),
        ("eight_bits", "integers", "logarithms"),
        ("cache_formats", "statistics"),
    ],
    "coat_jax.optax": [
        ("arguments", "trees"),
        ("states",),
        ("clipping", "rounding"),
        ("adam_state",),
        ("compression", "in_place"),
        ("adam", "partitioned"),
        ("muon",),
    ],
    "coat_jax.training": [
        ("data",),
        ("families",),
        ("config",),
        ("cluster", "resume_rules"),
        ("checkpoint", "compilation", "optimizer", "overrides"),
        ("config_files", "step"),
        ("held_out", "report"),
        ("run_folder", "setup"),
        ("loop",),
    ],
}
IMPORT_SHARE = 0.75  # of the time that JAX and optax take
HEAVY = {"triton", "torch", "jax_triton", "transformers", "orbax", "grain", "rich", "tokenizers"}


def modules_of(package):
    """Every module of a package by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = ("coat_jax", *path.relative_to(package).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules_of(PACKAGE)


def imports_of(source, module, is_package, modules):
    """The modules among `modules` that `source` imports, with the line of each."""
    own = module.split(".") if is_package else module.split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = own[: len(own) - node.level + 1] if node.level else []
            base = ".".join([*base, *filter(None, [node.module])])
            names = [(base, alias.name) for alias in node.names]
        else:
            continue
        for base, name in names:
            # `from coat_jax import ops` imports coat_jax.ops, not coat_jax.
            target = f"{base}.{name}" if f"{base}.{name}" in modules else base
            if target.split(".")[0] == "coat_jax":
                found.append((target, node.lineno))
    return found


def part_of(module, folder):
    """What the layers of a folder are made of: the first name under it."""
    return module.removeprefix(folder).split(".")[1] if module != folder else ""


def objections(imports, module):
    """What is wrong with these imports of a module, one line each."""
    found = []
    for folder, layers in INSIDE.items():
        if folder != "coat_jax" and not module.startswith(f"{folder}."):
            continue
        level = {part: height for height, parts in enumerate(layers) for part in parts}
        part = part_of(module, folder)
        if part not in level:
            return [f"{module} belongs to no layer: give {part!r} a place in INSIDE[{folder!r}]"]
        for target, line in imports:
            if target != folder and not target.startswith(f"{folder}."):
                continue
            other = part_of(target, folder)
            if other != part and level.get(other, len(layers)) >= level[part]:
                found.append(f"{module}:{line} imports {target}, which is not below it")
    return found


@functools.cache
def edges_of(module):
    path = MODULES[module]
    return imports_of(path.read_text("utf-8"), module, path.name == "__init__.py", MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_go_downwards(module):
    assert objections(edges_of(module), module) == []


def test_the_table_of_the_architecture_has_these_layers_in_this_order():
    text = (PACKAGE.parent / "docs/architecture.md").read_text("utf-8")
    table = text.partition("| layer |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)/?`", row.split("|")[1]) for row in table.splitlines()[2:]]
    line = {part: i for i, parts in enumerate(LAYERS) for part in parts}
    named = [part for row in rows for part in row]
    assert sorted(named) == sorted(line.keys() - {"", "__main__"})
    heights = [(min(line[part] for part in row), max(line[part] for part in row)) for row in rows]
    for (least, _), (_, most_below) in itertools.pairwise(heights):
        assert least >= most_below


def test_there_is_no_cycle():
    graph = {module: {target for target, _ in edges_of(module)} for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()


def test_every_import_of_the_package_exists():
    unknown = [
        f"{module}:{line} imports {target}"
        for module in MODULES
        for target, line in edges_of(module)
        if target not in MODULES
    ]
    assert unknown == []


BROKEN = {
    "coat_jax.numerics.formats": "from coat_jax.numerics import noise",
    "coat_jax.numerics.expansion": "def f():\n    from coat_jax.storage import Storage",
    "coat_jax.storage": "from .kernels import adam",
    "coat_jax.kernels.adam": "from ..optax import adam",
    "coat_jax.nn.linear": "import coat_jax.optax as o",
    "coat_jax.ops.linear": "if TYPE_CHECKING:\n    import coat_jax",
    "coat_jax.training.cluster.mesh": "from coat_jax.training.step import Batch",
    "coat_jax.utils": "import jax",
    "coat_jax.training.utils": "import jax",
}
KEPT = {
    "coat_jax.optax.adam": "import optax\nfrom coat_jax.numerics import expansion, noise",
    "coat_jax.optax.in_place": "from coat_jax.optax.trees import x\nfrom . import rounding",
    "coat_jax.cli": "from coat_jax.training import loop",
}


@pytest.mark.parametrize(("module", "source"), [*BROKEN.items(), *KEPT.items()])
def test_the_rule_can_be_broken_and_kept(module, source):
    found = objections(imports_of(source, module, False, MODULES), module)
    assert bool(found) == (module in BROKEN)


def import_afresh():
    """Imports the package in a new interpreter: the time that it takes, as a share of that of JAX
    and optax, and what is there then of the HEAVY modules; and what is there after all modules that
    launch kernels, and after the help of `coat train`. Processor time, as machines may be busy."""
    modules = [m for m in MODULES if m.startswith("coat_jax.kernels") and not in_triton(m)]
    source = f"""
import contextlib, sys, time
start = time.process_time()
import jax, optax
middle = time.process_time()
import coat_jax
print((time.process_time() - middle) / (middle - start))
print(*{HEAVY} & set(sys.modules))
import {", ".join(modules)}
print(*{HEAVY} & set(sys.modules))
import coat_jax.cli
with contextlib.redirect_stdout(sys.stderr):
    assert coat_jax.cli.main(["train", "--help"]) == 0
print(*{HEAVY} & set(sys.modules))
"""
    result = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    assert result.returncode == 0, result.stderr
    share, *heavy = result.stdout.splitlines()
    return float(share), *(modules.split() for modules in heavy)


first_import = functools.cache(import_afresh)


def test_importing_the_package_is_quick_and_without_triton_or_torch():
    """The best of three, of which the second and third are taken only if they matter."""
    share, heavy, *_ = first_import()
    assert heavy == []
    for _ in range(2):
        if share >= IMPORT_SHARE:
            share = min(share, import_afresh()[0])
    assert share < IMPORT_SHARE, "see `python -X importtime -c 'import coat_jax'`"


def test_importing_what_launches_kernels_imports_no_triton():
    """The modules of kernels/triton do, where the first kernel of each is launched."""
    assert first_import()[2] == []


def test_the_help_of_training_imports_neither_orbax_nor_grain():
    assert not {"orbax", "grain"} & set(first_import()[3])


def in_triton(module):
    """Whether a module holds kernels in Triton's language."""
    return module.startswith("coat_jax.kernels.triton.")


@pytest.mark.parametrize("module", [m for m in MODULES if in_triton(m)])
def test_kernels_import_kernels_only(module):
    """No module that launches them, and none of the package whose functions are not Triton's."""
    assert [target for target, _ in edges_of(module) if not in_triton(target)] == []

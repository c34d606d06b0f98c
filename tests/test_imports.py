"""The layers: who may import whom, what `import numattn` loads, and what families export."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import numattn

ROOT = Path(numattn.__file__).parent
FAMILIES = ("sparse", "lowrank", "kernel", "latent", "tensor")
LAYERS = {
    "core": 0,
    "engines": 1,
    "exact": 2,
    **dict.fromkeys(FAMILIES, 2),
    "measure": 3,
    "testing": 3,
    "solve": 4,
    "hf": 5,
    "cli": 6,  # the only one above `hf`, whose captures it makes
    "__main__": 7,
}
SURFACE = 2.5  # `import numattn`: every method, so only what stands above them may use it
OPTIONAL = (
    "scipy",
    "matplotlib",
    "plotly",
    "rich",
    "tensorly",
    "opt_einsum",
    "safetensors",
    "transformers",
    "triton",
)


def part(module):
    """The layer's name of a module: the first name after numattn."""
    return module.split(".")[1]


def is_module(name):
    path = ROOT.parent / Path(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imported(tree, package):
    """Modules of numattn that a file imports, wherever in it; `numattn` itself for its names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "numattn")
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*base, source]).rstrip(".")
            if source == "numattn":
                for alias in node.names:
                    name = f"numattn.{alias.name}"
                    yield name if is_module(name) else "numattn"
            elif source.startswith("numattn."):
                yield source


def breaches(importer, tree, package):
    """Imports of one file that go up, or sideways into another package."""
    mine = part(importer)
    for module in imported(tree, package):
        if module == "numattn":
            if LAYERS[mine] < SURFACE:
                yield f"{importer} imports numattn itself"
            continue
        theirs = part(module)
        if theirs != mine and LAYERS[theirs] >= LAYERS[mine]:
            yield f"{importer} (layer {LAYERS[mine]}) imports {module} (layer {LAYERS[theirs]})"


def files():
    for path in sorted(ROOT.rglob("*.py")):
        names = path.relative_to(ROOT.parent).with_suffix("").parts
        if names != ("numattn", "__init__"):
            yield ".".join(names), path


@pytest.mark.parametrize(
    ("module", "path"), list(files()), ids=lambda x: x if "." in str(x) else ""
)
def test_layers(module, path):
    assert part(module) in LAYERS, f"say in which layer {part(module)} stands"
    package = module.rpartition(".")[0]
    found = list(breaches(module, ast.parse(path.read_text()), package))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("numattn.core.x", "from numattn.engines.linear import write"),
        ("numattn.engines.x", "import numattn.kernel.performer"),
        ("numattn.engines.x", "from numattn import exact"),
        ("numattn.kernel.x", "from numattn.lowrank import nystrom"),
        ("numattn.kernel.x", "def f():\n    from numattn.exact import exact_attention"),
        ("numattn.sparse.x", "from numattn import get"),
        ("numattn.sparse.x", "from ..kernel import performer"),
        ("numattn.measure.x", "from numattn.testing import check"),
        ("numattn.testing.x", "from numattn import cli"),
    ],
)
def test_a_breach_of_the_layers_is_noticed(module, line):
    assert list(breaches(module, ast.parse(line), module.rpartition(".")[0]))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("numattn.kernel.x", "from numattn.kernel.features import y"),
        ("numattn.kernel.x", "from .features import y"),
        ("numattn.kernel.x", "from numattn.engines import linear as engine"),
        ("numattn.measure.x", "from numattn import get, exact"),
    ],
)
def test_an_import_from_below_is_allowed(module, line):
    assert not list(breaches(module, ast.parse(line), module.rpartition(".")[0]))


def test_import_numattn_loads_no_optional_package():
    """Beyond what torch itself loads."""
    code = (
        "import sys, torch; before = set(sys.modules); import numattn; "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT.parent,
    )
    loaded = set(done.stdout.split())
    assert "numattn" in loaded
    assert not loaded & set(OPTIONAL)


# --- exports --------------------------------------------------------------------------------


def decorators(node):
    return [ast.unparse(d) for d in node.decorator_list]


def public(path):
    """What a method file must export: its records, their functions, and their modules."""
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        if "register" in decorators(node):
            yield node.name
            yield from (
                statement.value.args[0].id
                for statement in node.body
                if isinstance(statement, ast.Assign)
                and isinstance(statement.value, ast.Call)
                and ast.unparse(statement.value.func) == "staticmethod"
            )
        elif node.name.endswith("Attention"):
            yield node.name


def method_files():
    yield "numattn", ROOT / "exact.py"
    for family in FAMILIES:
        for path in sorted((ROOT / family).glob("*.py")):
            if path.name != "__init__.py":
                yield f"numattn.{family}", path


@pytest.mark.parametrize(
    ("package", "path"), list(method_files()), ids=lambda x: getattr(x, "stem", x)
)
def test_families_export_their_methods(package, path):
    """In the typed form, so that type checkers see the name too."""
    init = ROOT.parent / Path(*package.split(".")) / "__init__.py"
    lines = init.read_text().splitlines()
    for name in public(path):
        line = f"from {package}.{path.stem} import {name} as {name}"
        assert line in lines, f"{init.relative_to(ROOT.parent)} lacks the line\n{line}"


def test_every_registered_method_lives_in_its_family():
    for record in numattn.methods():
        info, function = record.info, record.function
        home = numattn if info.family == "exact" else getattr(numattn, info.family)
        assert getattr(home, record.__name__) is record
        assert getattr(home, function.__name__) is function
        assert record.__module__ == f"{home.__name__}.{info.name}"

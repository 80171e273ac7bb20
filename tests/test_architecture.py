"""The house rules, as tests. Each rule is also tried on a made-up module that breaks it."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import opencon

SOURCE = Path(opencon.__file__).parent

# A module may import only from rooms on floors below its own.
FLOORS = [
    {"errors", "version"},
    {"registry"},  # config asks it for did-you-mean
    {"config", "runtime", "prototype_kernel"},  # the last: opened by prototypes, on a GPU only
    {"losses", "prototypes", "cluster", "mixture", "metrics", "encoders", "data"},
    {"methods", "features", "class_count", "novelty", "optim", "runs"},
    {"trainer", "report", "anchor_count"},
    {"openworld", "finetune"},
    {"model"},
    {"export", "assignments"},
    {"discover", "estimator", "handover", "experiments"},
    {"cli"},
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
EXEMPT = {"__init__", "__main__"}  # of the package itself: they open the door to everything
MOST_LINES = 400
OPTIONAL = ("matplotlib", "tensorboard", "timm", "umap")


def modules(root):
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(root.rglob("*.py"))]


def room_of(path, root):
    return path.relative_to(root).parts[0].removesuffix(".py")


def imported_rooms(path, tree, root):
    """Rooms of the package that a module imports, anywhere in it; '' is the package itself."""
    rooms = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ["opencon", *path.relative_to(root).parent.parts]
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            names = [".".join(base)] if len(base) > 1 else [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "opencon":
                room = rest.partition(".")[0]
                rooms.add(room if room in FLOOR or (root / room).is_dir() or (root / f"{room}.py").is_file() else "")
    return rooms


def upward_imports(root):
    wrong = []
    for path, tree in modules(root):
        room = room_of(path, root)
        if room in EXEMPT:
            continue
        if room not in FLOOR:
            wrong.append(f"{path.name}: {room} has no floor; give it one in FLOORS")
            continue
        for other in sorted(imported_rooms(path, tree, root) - {room}):
            if other not in FLOOR:
                wrong.append(f"{path.name}: {room} may not import {other or 'the package itself'}")
            elif FLOOR[other] >= FLOOR[room]:
                wrong.append(f"{path.name}: {room} may not import {other}")
    return wrong


def long_files(root):
    lengths = [(path, len(path.read_text(encoding="utf-8").splitlines())) for path in sorted(root.rglob("*.py"))]
    return [f"{path.name}: {length} lines" for path, length in lengths if length > MOST_LINES]


def dotted(node):
    """'a.b.c' for a chain of names, else ''."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and dotted(node.value):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def unwanted(root):
    """Bare except, print outside the command line, anything that executes what it loads, notes to self."""
    wrong = []
    for path, tree in modules(root):
        for node in ast.walk(tree):
            at = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(f"{at}: bare except")
            if isinstance(node, ast.Call):
                name = dotted(node.func)
                if name == "print" and room_of(path, root) != "cli":
                    wrong.append(f"{at}: print outside cli")
                if name in ("pickle.load", "pickle.loads"):
                    wrong.append(f"{at}: {name}")
                for keyword in node.keywords:
                    value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                    if (keyword.arg, value) in (("weights_only", False), ("allow_pickle", True)):
                        wrong.append(f"{at}: {keyword.arg}={value}")
            if isinstance(node, ast.ImportFrom) and node.module == "pickle":
                wrong += [f"{at}: pickle.{a.name}" for a in node.names if a.name in ("load", "loads")]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            wrong += [f"{path.name}:{number}: {word}" for word in ("TODO", "FIXME") if word in line]
    return wrong


# --- the package ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [upward_imports, long_files, unwanted])
def test_the_package_keeps_the_rule(rule):
    assert rule(SOURCE) == []


@pytest.mark.parametrize("module", ["opencon", "opencon.cli"])
def test_extras_are_not_imported_before_they_are_needed(module):
    code = f"import sys, {module}; print(*(name for name in {OPTIONAL} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert found == []


def test_every_exported_name_resolves():
    packages = [m.name for m in pkgutil.walk_packages([str(SOURCE)], "opencon.") if m.ispkg]
    for package in ["opencon", *packages]:
        module = importlib.import_module(package)
        exported = getattr(module, "__all__", [])
        assert [name for name in exported if not hasattr(module, name)] == [], package
        assert len(set(exported)) == len(exported), package


# --- the rules themselves ---------------------------------------------------------------------------------------------


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("errors.py", "from opencon.registry import Registry", "errors may not import registry"),
        ("metrics.py", "import opencon.trainer", "metrics may not import trainer"),
        ("metrics.py", "from opencon import trainer", "metrics may not import trainer"),
        ("metrics.py", "from .trainer import fit", "metrics may not import trainer"),
        ("metrics.py", "from . import trainer", "metrics may not import trainer"),
        ("losses/pairwise.py", "from ..methods.base import Batch", "losses may not import methods"),
        ("losses/pairwise.py", "def f():\n    from opencon.methods import base", "losses may not import methods"),
        ("losses/pairwise.py", "from opencon.cluster import kmeans", "losses may not import cluster"),
        ("config.py", "import opencon.runtime", "config may not import runtime"),
        ("metrics.py", "from opencon import __version__", "metrics may not import the package itself"),
        ("metrics.py", "import opencon", "metrics may not import the package itself"),
        ("helpers.py", "", "helpers has no floor; give it one in FLOORS"),
    ],
)
def test_an_upward_import_is_found(tmp_path, name, text, wrong):
    write(tmp_path, name, text)
    assert upward_imports(tmp_path) == [f"{Path(name).name}: {wrong}"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("losses/pairwise.py", "from opencon.runtime import gather\nfrom opencon.losses.masks import within"),
        ("losses/pairwise.py", "from .masks import within\nfrom . import masks\nfrom ..errors import DataError"),
        ("cli.py", "import opencon.trainer, opencon.errors\nfrom opencon import discover, version"),
        ("metrics.py", "import numpy as np\nfrom openconnect import trainer"),
        ("__init__.py", "from opencon.cli import main"),
        ("__main__.py", "from opencon.cli import main"),
    ],
)
def test_downward_imports_are_fine(tmp_path, name, text):
    write(tmp_path, name, text)
    assert upward_imports(tmp_path) == []


def test_a_long_file_is_found(tmp_path):
    write(tmp_path, "fits.py", "x = 1\n" * MOST_LINES)
    write(tmp_path, "long.py", "x = 1\n" * (MOST_LINES + 1))
    assert long_files(tmp_path) == ["long.py: 401 lines"]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("try:\n    pass\nexcept:\n    pass", "3: bare except"),
        ("print(1)", "1: print outside cli"),
        ("import pickle\npickle.load(f)", "2: pickle.load"),
        ("import pickle\npickle.loads(b)", "2: pickle.loads"),
        ("from pickle import load", "1: pickle.load"),
        ("torch.load(f, weights_only=False)", "1: weights_only=False"),
        ("np.load(f, allow_pickle=True)", "1: allow_pickle=True"),
        ("x = 1  # TODO", "1: TODO"),
        ("x = 1  # FIXME later", "1: FIXME"),
    ],
)
def test_what_nobody_wants_is_found(tmp_path, text, wrong):
    write(tmp_path, "metrics.py", text)
    assert unwanted(tmp_path) == [f"metrics.py:{wrong}"]


def test_what_is_allowed_is_left_alone(tmp_path):
    write(tmp_path, "cli.py", "print(1)")
    write(tmp_path, "data/archive.py", "import pickle\nclass Plain(pickle.Unpickler):\n    pass")
    write(tmp_path, "runs.py", "try:\n    torch.load(f, weights_only=True)\nexcept OSError:\n    console.print(1)")
    assert unwanted(tmp_path) == []

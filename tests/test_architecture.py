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

# A module may import from rooms on lower floors, and from rooms of its own floor as long as they do not import it back.
FLOORS = [
    {
        "errors",
        "version",
        "registry",
        "files",
        "config",
        "runtime",
        "rows",
        "plugins",
        "processes",
    },  # the ground: words, settings, the machine
    {
        "losses",
        "prototypes",
        "cluster",
        "metrics",
        "novelty",
        "encoders",
        "data",
    },  # formulas, material
    {"methods", "counting"},  # what the papers propose
    {"training", "report"},  # to learn, and to show
    {"openworld", "photos", "experiments", "review"},  # whole tasks
    {"estimator", "api", "cli"},  # doors
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
EXEMPT = {"__init__", "__main__"}  # of the package itself: they open the door to everything
MOST_LINES = 500  # of a file: where to ask whether it holds two ideas
MOST_LINES_OF_A_FUNCTION = 70  # a screen
OPTIONAL = (
    "matplotlib",
    "tensorboard",
    "timm",
    "umap",
    "pandas",
    "huggingface_hub",
    "onnx",
    "wandb",
    "mlflow",
    "pillow_heif",
    "starlette",
    "uvicorn",
)


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
            elif FLOOR[other] > FLOOR[room]:
                wrong.append(f"{path.name}: {room} may not import {other}")
    return wrong


def rooms_in_a_circle(root):
    """Rooms that import one another, by whatever way round."""
    below = {}
    for path, tree in modules(root):
        room = room_of(path, root)
        if room not in EXEMPT:
            below.setdefault(room, set()).update(imported_rooms(path, tree, root) - {room, ""})
    while True:
        settled = {room for room, others in below.items() if not others & set(below)}
        if not settled:
            return sorted(below)
        below = {room: others for room, others in below.items() if room not in settled}


def long_files(root):
    lengths = [(path, len(path.read_text(encoding="utf-8").splitlines())) for path in sorted(root.rglob("*.py"))]
    return [f"{path.name}: {length} lines" for path, length in lengths if length > MOST_LINES]


def long_functions(root):
    return [
        f"{path.name}: {node.name} has {node.end_lineno - node.lineno} lines"
        for path, tree in modules(root)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno > MOST_LINES_OF_A_FUNCTION
    ]


def crowded_top(root):
    """At most a dozen modules lie beside the rooms."""
    top = sorted(path.name for path in root.glob("*.py") if path.stem not in EXEMPT)
    return [] if len(top) <= 12 else top


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


@pytest.mark.parametrize("rule", [upward_imports, rooms_in_a_circle, long_files, long_functions, crowded_top, unwanted])
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
        ("errors.py", "from opencon.losses import contrastive", "errors may not import losses"),
        ("metrics.py", "import opencon.training", "metrics may not import training"),
        ("metrics.py", "from opencon import training", "metrics may not import training"),
        ("metrics.py", "from .training import trainer", "metrics may not import training"),
        ("metrics.py", "from . import training", "metrics may not import training"),
        ("losses/pairwise.py", "from ..methods.base import Batch", "losses may not import methods"),
        ("losses/pairwise.py", "def f():\n    from opencon.methods import base", "losses may not import methods"),
        ("training/trainer.py", "from opencon.photos.model import OpenConModel", "training may not import photos"),
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
        ("cli.py", "import opencon.training, opencon.errors\nfrom opencon import photos, version"),
        ("metrics.py", "import numpy as np\nfrom openconnect import training"),
        ("photos/model.py", "from opencon.openworld.fit import Fitted"),
        ("__init__.py", "from opencon.cli import main"),
        ("__main__.py", "from opencon.cli import main"),
    ],
)
def test_downward_imports_are_fine(tmp_path, name, text):
    write(tmp_path, name, text)
    assert upward_imports(tmp_path) == []


def test_rooms_in_a_circle_are_found(tmp_path):
    write(tmp_path, "openworld/fit.py", "from opencon.photos.model import OpenConModel")
    write(tmp_path, "photos/model.py", "def f():\n    from opencon.openworld import fit")
    write(tmp_path, "cli/base.py", "from opencon.errors import DataError")
    write(tmp_path, "errors.py", "")
    assert rooms_in_a_circle(tmp_path) == ["openworld", "photos"]


def test_a_long_function_is_found(tmp_path):
    write(tmp_path, "metrics.py", "def f():\n" + "    x = 1\n" * (MOST_LINES_OF_A_FUNCTION + 1))
    assert long_functions(tmp_path) == [f"metrics.py: f has {MOST_LINES_OF_A_FUNCTION + 1} lines"]


def test_a_crowded_top_is_found(tmp_path):
    for number in range(13):
        write(tmp_path, f"m{number:02}.py", "")
    assert len(crowded_top(tmp_path)) == 13


def test_a_long_file_is_found(tmp_path):
    write(tmp_path, "fits.py", "x = 1\n" * MOST_LINES)
    write(tmp_path, "long.py", "x = 1\n" * (MOST_LINES + 1))
    assert long_files(tmp_path) == [f"long.py: {MOST_LINES + 1} lines"]


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

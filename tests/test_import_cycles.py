"""No module imports itself by a detour. Imports inside functions and under TYPE_CHECKING count like any other."""

import ast
from pathlib import Path

import pytest

import opencon

SOURCE = Path(opencon.__file__).parent


def module_name(path, root):
    """`root/data/split.py` -> "opencon.data.split"; a package is named without its `__init__`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(["opencon", *parts]).removesuffix(".__init__")


def imported_names(path, root):
    """Every dotted name that a module imports, anywhere in it: "opencon.errors.DataError"."""
    package = ["opencon", *path.relative_to(root).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            yield from (".".join([*start, *filter(None, [node.module]), alias.name]) for alias in node.names)


def import_graph(root):
    """Module -> the modules of the package that it names in its imports.

    Python also opens the packages around a module. They are left out: else every package that imports a part of itself
    would be a cycle.
    """
    paths = {module_name(path, root): path for path in sorted(root.rglob("*.py"))}

    def module_of(name):
        """The longest start of a dotted name that is a module; None outside the package."""
        while name and name not in paths:
            name = name.rpartition(".")[0]
        return name or None

    return {name: {module_of(n) for n in imported_names(path, root)} - {None} for name, path in paths.items()}


def import_cycles(root):
    """Groups of modules of which each imports, over any number of steps, all the others."""
    graph = import_graph(root)

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {tuple(sorted(m for m in reach[name] if name in reach[m])) for name in graph if name in reach[name]}
    return sorted(groups)


def test_the_package_has_no_cycle():
    assert import_cycles(SOURCE) == []


# --- the rule itself, on made-up packages -------------------------------------------------------------------------------


def write_package(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "back",
    [
        "import opencon.a",
        "from opencon import a",
        "from opencon.a import thing",
        "from . import a",
        "from .a import thing",
        "def f():\n    from opencon.a import thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from opencon.a import Thing",
    ],
)
def test_two_modules_that_import_each_other(tmp_path, back):
    write_package(tmp_path, {"a.py": "from opencon.b import other", "b.py": back, "c.py": "import opencon.a"})
    assert import_cycles(tmp_path) == [("opencon.a", "opencon.b")]


def test_a_detour_over_rooms_and_a_second_cycle(tmp_path):
    files = {
        "data/__init__.py": "",
        "data/views.py": "from ..encoders import net",
        "encoders/__init__.py": "",
        "encoders/net.py": "from .parts import part",
        "encoders/parts.py": "from opencon.data.views import view",
        "left.py": "import opencon.right",
        "right.py": "import opencon.left",
        "alone.py": "import opencon.alone",
    }
    write_package(tmp_path, files)
    assert import_cycles(tmp_path) == [
        ("opencon.alone",),
        ("opencon.data.views", "opencon.encoders.net", "opencon.encoders.parts"),
        ("opencon.left", "opencon.right"),
    ]


def test_a_package_that_a_part_of_it_asks_for_a_name(tmp_path):
    files = {"methods/__init__.py": "from opencon.methods.kmeans import KMeans", "methods/kmeans.py": ""}
    write_package(tmp_path, files)
    assert import_cycles(tmp_path) == []
    write_package(tmp_path, {"methods/kmeans.py": "from opencon.methods import METHODS"})
    assert import_cycles(tmp_path) == [("opencon.methods", "opencon.methods.kmeans")]


def test_imports_in_one_direction_are_no_cycle(tmp_path):
    files = {
        "a.py": "import numpy\nfrom opencon.b import other\nimport opencon.c",
        "b.py": "from opencon.c import third\nfrom openconnect.a import thing",
        "c.py": "import torch",
    }
    write_package(tmp_path, files)
    assert import_cycles(tmp_path) == []

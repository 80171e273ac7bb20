"""The command `list`: every name that can be typed, and where those that are not ours come from."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from opencon.cli.base import Imports, app, console, import_plugins
from opencon.errors import ConfigError
from opencon.registry import Registry


@app.command("list", short_help="Show methods, data sets, encoders and all other names.")
def list_names(
    what: Annotated[
        str | None,
        typer.Argument(
            help="methods, data, encoders, views, optimizers, schedules or recipes; default: all but recipes."
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Show methods, data sets, encoders, views, optimizers and schedules, or every recipe."""
    from opencon.data.augment import AUGMENTATIONS
    from opencon.data.benchmarks import DATASETS
    from opencon.encoders import ENCODERS
    from opencon.experiments.recipes import SETTINGS, recipe_names
    from opencon.methods import METHODS
    from opencon.training.optimizer import OPTIMIZERS, SCHEDULES

    import_plugins(imports)
    kinds = ("methods", "data", "encoders", "views", "optimizers", "schedules", "recipes")
    if what is not None and what not in kinds:
        raise ConfigError(f"list {what!r}: choose one of {', '.join(kinds)}.")
    if what in (None, "methods"):
        methods = names_table("Methods", "method", "name", "paper", "year", "needs", "protocol")
        for name in METHODS.names():
            entry = METHODS[name]
            methods.add_row(name, entry.title, entry.paper, str(entry.year), entry.needs, entry.protocol)
        console.print(methods)
        console.print("count: the number of classes, seen and novel; `opencon count` estimates it.")
    if what in (None, "data"):
        sets = names_table("Data sets with recipes", "data set", "what it is", "encoder", "protocol")
        for name in SETTINGS.names():
            setting = SETTINGS[name]
            sets.add_row(name, setting.title, setting.encoder, setting.protocol)
        console.print(sets)
        console.print(f"Files of your own, and all else that data.name takes: {', '.join(DATASETS.names())}")
    if what in (None, "encoders"):
        console.print(f"Encoders (encoder.name): {', '.join(ENCODERS.names())}")
    parts = {
        "views": ("Views (augment.name, strong.name, views.N.name)", {n: AUGMENTATIONS[n].what for n in AUGMENTATIONS}),
        "optimizers": ("Optimizers (train.optimizer)", {n: OPTIMIZERS[n].paper for n in OPTIMIZERS}),
        "schedules": ("Schedules (train.schedule)", {n: SCHEDULES[n].what for n in SCHEDULES}),
    }
    for part, (title, entries) in parts.items():
        if what in (None, part):
            console.print(f"{title}: {', '.join(f'{name} ({about})' for name, about in entries.items())}")
    registries: dict[str, tuple[Registry[Any], ...]] = {
        "methods": (METHODS,),
        "data": (SETTINGS, DATASETS),
        "encoders": (ENCODERS,),
        "views": (AUGMENTATIONS,),
        "optimizers": (OPTIMIZERS,),
        "schedules": (SCHEDULES,),
    }
    for registry in [r for kind, some in registries.items() if what in (None, kind) for r in some]:
        for name, origin in registry.origins.items():
            console.print(f"The {registry.kind} {name} comes from {origin}.")
    if what == "recipes":
        console.print("\n".join(recipe_names()))
    elif what is None:
        console.print("Train: opencon train METHOD/DATASET, such as opencon/cifar100")


def names_table(title: str, first: str, *others: str) -> Table:
    """A table whose first column, the name to type, is never wrapped."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for other in others:
        table.add_column(other, overflow="fold")
    return table

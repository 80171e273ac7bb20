"""Files and packages of others that register methods, encoders, data sets, views, optimizers or schedules.

A plugin is a Python file given with --import, or a module that an installed package names in the entry-point group
`opencon.plugins`. A run writes down which plugins it needs (`recorded`), and whoever opens it gets them again (`recall`).
Opening a run executes nothing that its reader has not imported before: a file is imported again by itself only if the same
user has given these very bytes with --import; otherwise one sentence says what to give.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from opencon.errors import ConfigError, MissingPluginError
from opencon.files import parse_json, read_file, write_whole
from opencon.registry import Origin, Registry

GROUP = "opencon.plugins"
RECORD = "plugins.json"  # in the folder of a run
IMPORTED = Path("~/.cache/opencon/imported.json")  # checksums of the files that this user has imported


# --- to import --------------------------------------------------------------------------------------------------------


def import_file(path: str | Path) -> Origin:
    """Import a plugin file. The same file is imported once; after a change it takes its own place."""
    path = Path(path).expanduser()
    try:
        content = read_file(path)
    except OSError as err:
        raise ConfigError(f"--import {path}: the file cannot be read ({err.strerror}).") from err
    origin = Origin("file", str(path.resolve()), hashlib.sha256(content).hexdigest())
    if origin in _known():
        return origin
    for old in [known for known in _known() if known.place == origin.place]:
        Registry.forget(old)
    name = f"opencon_plugin_{path.stem}_{origin.checksum[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--import {path} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    beside = str(path.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)  # it may import what lies beside it
    with _explained(f"--import {path}", origin, str(path)), Registry.loading(origin):
        spec.loader.exec_module(module)
    if origin not in _known():
        raise ConfigError(f"--import {path} registers nothing. It should call METHODS.add, for example.")
    _remember(origin)
    return origin


_installed: set[str] = set()  # entry points that have been imported, or have failed to


def import_installed() -> list[str]:
    """Import what installed packages bring, once. Returns a sentence for each that cannot be imported."""
    problems = []
    for point in entry_points(group=GROUP):
        if point.value in _installed:
            continue
        _installed.add(point.value)
        origin = _origin(point)
        try:
            with _explained(f"the plugin {point.name} of {origin.checksum}", origin, ""), Registry.loading(origin):
                point.load()
        except ConfigError as err:
            problems.append(str(err))
    return problems


def _origin(point: EntryPoint) -> Origin:
    package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"
    return Origin("entry point", point.value, package)


def _known() -> set[Origin]:
    """Where everything that is registered comes from, as far as it is not ours."""
    return {origin for registry in Registry.every for origin in registry.origins.values()}


@contextlib.contextmanager
def _explained(what: str, origin: Origin, file: str) -> Iterator[None]:
    """An error inside becomes one sentence with its line; nothing of the plugin stays registered."""
    try:
        yield
    except Exception as err:  # whatever a stranger's code may raise
        Registry.forget(origin)
        lines = [frame.lineno for frame in traceback.extract_tb(err.__traceback__) if frame.filename == file]
        at = f", line {err.lineno}" if isinstance(err, SyntaxError) else f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"{what} cannot be imported{at} ({type(err).__name__}: {err}).") from err


# --- to remember ------------------------------------------------------------------------------------------------------


def recorded(used: Iterable[tuple[Registry[Any], str]]) -> dict[str, Any]:
    """What a run must remember about the names it uses: {} if all of them are ours."""
    plugins: dict[Origin, list[str]] = {}
    for registry, name in used:
        origin = registry.origins.get(name)
        if origin is not None:
            plugins.setdefault(origin, []).append(f"{registry.kind} {name}")
    records = [{"kind": o.kind, "place": o.place, "checksum": o.checksum, "brings": plugins[o]} for o in plugins]
    return {"plugins": records} if records else {}


def write_record(folder: Path) -> None:
    """Write down in a folder all that has been imported, for those who open it."""
    record = recorded((registry, name) for registry in Registry.every for name in registry.origins)
    write_whole(folder / RECORD, lambda partial: partial.write_text(json.dumps(record, indent=1), encoding="utf-8"))


def recall(folder: Path) -> None:
    """Import again what the run in this folder needs, or say what is missing in a `MissingPluginError`."""
    for record in _records(folder):
        brings, place = ", ".join(record["brings"]), record["place"]
        origin = Origin(record["kind"], place, record["checksum"])
        registered = {f"{r.kind} {name}": r.origins.get(name) for r in Registry.every for name in r}
        if all(what in registered for what in record["brings"]):
            if origin.kind == "file" and origin.checksum not in {o.checksum for o in registered.values() if o}:
                warnings.warn(
                    f"the {brings} of {folder} came from {place or 'a session'} as it was then.", stacklevel=3
                )
            continue
        needs = f"{folder} needs the {brings}, which came"
        if origin.kind == "entry point":
            problems = import_installed()
            if origin.place not in {known.place for known in _known()}:
                why = f" ({problems[0]})" if problems else ""
                raise MissingPluginError(f"{needs} with the package {origin.checksum}. Install it again{why}.")
            continue
        again = f"give it with --import {place}"
        if not place:
            raise MissingPluginError(
                f"{needs} from an interactive session. Put it into a file, and give it with --import."
            )
        path = Path(place)
        if not path.is_file():
            raise MissingPluginError(f"{needs} from {place}, and that file is gone. Give it with --import FILE.")
        if hashlib.sha256(read_file(path)).hexdigest() != origin.checksum:
            raise MissingPluginError(f"{needs} from {place}, which has changed since. To use it as it is now, {again}.")
        if origin.checksum not in _imported():
            raise MissingPluginError(f"{needs} from {place}. You have never imported that file: to trust it, {again}.")
        import_file(path)


def needs(folder: Path) -> list[str]:
    """What the run or model in this folder takes from others, each in a few words."""
    said = []
    for record in _records(folder):
        file = f"{Path(record['place']).name or 'a session'}, to be given with --import once"
        source = file if record["kind"] == "file" else f"the package {record['checksum']}"
        said.append(f"{', '.join(record['brings'])} of {source}")
    return said


def check_unchanged(folder: Path, now: Mapping[str, Any]) -> None:
    """Refuse to go on with a run whose plugins have changed since it began."""
    sums = {record["place"]: record["checksum"] for record in now.get("plugins", [])}
    for record in _records(folder):
        place = record["place"]
        if record["kind"] == "file" and sums.get(place, record["checksum"]) != record["checksum"]:
            raise ConfigError(
                f"{place}, which {folder} needs for its {', '.join(record['brings'])}, has changed since the run began. "
                f"Start over in a new folder (--out), or put the file back to resume."
            )


def _records(folder: Path) -> list[dict[str, Any]]:
    path = folder / RECORD
    if not path.is_file():
        return []
    try:
        records = parse_json(read_file(path))["plugins"]
        return [{key: record[key] for key in ("kind", "place", "checksum", "brings")} for record in records]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise MissingPluginError(f"cannot read {path} ({err}). The run folder is damaged.") from err


def _imported() -> set[str]:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return set(parse_json(read_file(IMPORTED.expanduser())))
    return set()


def _remember(origin: Origin) -> None:
    """Note that this user has imported these bytes. Where that cannot be written, the next command asks again."""
    text = json.dumps(sorted(_imported() | {origin.checksum}), indent=1)
    with contextlib.suppress(OSError):
        IMPORTED.expanduser().parent.mkdir(parents=True, exist_ok=True)
        write_whole(IMPORTED.expanduser(), lambda partial: partial.write_text(text, encoding="utf-8"))

"""Settings as plain data: read from TOML or JSON, changed by --set, written to a run's folder.

An unknown key or a value of the wrong type is a `ConfigError` that names the key.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

from opencon.config.sections import MethodConfig, RunConfig
from opencon.errors import ConfigError, require, shown
from opencon.files import parse_json
from opencon.registry import did_you_mean

C = TypeVar("C")


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain data, ready for JSON; a method's settings carry its name."""
    out: dict[str, Any] = {"name": config.name} if isinstance(config, MethodConfig) else {}
    return out | {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return to_dict(value) if dataclasses.is_dataclass(value) else value


def from_dict(cls: type[C], data: Mapping[str, Any], *, method: type[MethodConfig] | None = None, at: str = "") -> C:
    """Build a config from plain data, refusing unknown keys and wrong types.

    `method` is the settings class for the key "method", whose own "name" entry is only checked for agreement.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    data = dict(data)
    if issubclass(cls, MethodConfig):
        name = data.pop("name", cls.name)
        require(
            name == cls.name,
            f"{at}name = {name!r} does not belong to the settings of {cls.name!r}. Every method has recipes of its own: "
            f"METHOD/DATASET.",
        )
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            near = did_you_mean(key, known)  # looked for only now: it takes longer than all the rest
            raise ConfigError(f"unknown setting {at + key!r}.{near} Known here: {', '.join(sorted(known))}.")
        hint = method if key == "method" and method is not None else hints[key]
        values[key] = _convert(value, hint, at + key)
    missing = [
        at + name
        for name, f in known.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    require(not missing, f"missing setting: {', '.join(missing)}.")
    return cls(**values)


def with_settings(config: C, settings: Iterable[str]) -> C:
    """Apply `a.b=c` settings to a copy. Values are read as JSON where they are JSON, else as text.

    An entry of a list of sections goes by its number: `views.0.size=16`.
    """
    data = to_dict(config)
    for setting in settings:
        key, equals, text = setting.partition("=")
        require(bool(equals) and bool(key), f"--set {setting!r} is not of the form section.key=value.")
        *sections, last = key.strip().split(".")
        holders = [name for name, inner in data.items() if isinstance(inner, dict) and last in inner]
        full = " or ".join(f"{name}.{last}" for name in holders)
        require(bool(sections) or last in data or not holders, f"--set {key}: did you mean {full}?")
        section: Any = data
        for depth, name in enumerate(sections):
            known = {str(i): inner for i, inner in enumerate(section)} if isinstance(section, list) else section
            where = ".".join(sections[: depth + 1])
            if not isinstance(known.get(name), (dict, list)):
                near = did_you_mean(name, known)
                there = ", ".join(sorted(known)) or "none"
                raise ConfigError(f"--set {key}: there is no section {where!r}.{near} Known here: {there}.")
            section = known[name]
        require(isinstance(section, dict), f"--set {key}: {'.'.join(sections)} is a list. Give all of it.")
        section[last] = _parse(text.strip())
    method = getattr(config, "method", None)
    return from_dict(type(config), data, method=type(method) if method is not None else None)


def with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """The plain data of a run, where settings that came after it was written have their defaults.

    The settings of a method are left as they are: they belong to its file.
    """
    return typing.cast("dict[str, Any]", _filled(data, RunConfig))


def _filled(value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) in (Union, types.UnionType):
        hint = next((a for a in typing.get_args(hint) if dataclasses.is_dataclass(a)), None)
    if isinstance(value, (list, tuple)) and typing.get_origin(hint) is tuple:
        return [_filled(inner, typing.get_args(hint)[0]) for inner in value]
    if not isinstance(value, Mapping) or not dataclasses.is_dataclass(hint) or hint is MethodConfig:
        return value
    hints = typing.get_type_hints(hint)
    out = {key: _filled(inner, hints.get(key)) for key, inner in value.items()}
    for f in dataclasses.fields(hint):
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if f.name not in out and default is not dataclasses.MISSING:
            out[f.name] = _plain(default)
    return out


def differences(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> dict[str, tuple[Any, Any]]:
    """Every leaf at which two nested configs differ: dotted key to (old value, new value)."""
    out: dict[str, tuple[Any, Any]] = {}
    for key in [*old, *(k for k in new if k not in old)]:
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out.update(differences(a, b, f"{at}{key}."))
        elif a != b:
            out[f"{at}{key}"] = (a, b)
    return out


def _parse(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None if text in ("None", "none") else {"True": True, "False": False}.get(text, text)


def _convert(value: Any, hint: Any, at: str) -> Any:
    """`value` as the type `hint`, or a ConfigError that names the key."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [a for a in args if a is not type(None)]
        for option in options[:-1]:
            try:
                return _convert(value, option, at)
            except ConfigError:
                continue
        return _convert(value, options[-1], at)
    if origin is Literal:
        require(value in args, f"{at} = {shown(value)} must be one of {', '.join(map(repr, args))}.")
        return value
    if origin is tuple:
        if args[0] is str:  # names, which may be numbers, too
            if isinstance(value, (str, int)):
                value = [part.strip() for part in str(value).split(",") if part.strip()]
            if isinstance(value, (list, tuple)):
                value = [str(part) if type(part) is int else part for part in value]
        if isinstance(value, str):
            value = [_parse(part.strip()) for part in value.strip("()[] ").split(",") if part.strip()]
        require(isinstance(value, (list, tuple)), f"{at} = {shown(value)} must be a list.")
        if args[-1] is Ellipsis:
            named = dataclasses.is_dataclass(args[0])  # a list of sections: each goes by its number
            return tuple(_convert(v, args[0], f"{at}.{i}" if named else at) for i, v in enumerate(value))
        require(len(value) == len(args), f"{at} = {shown(value)} must have {len(args)} values.")
        return tuple(_convert(v, a, at) for v, a in zip(value, args, strict=True))
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, Mapping), f"{at} = {shown(value)} must be a section with settings of its own.")
        return from_dict(typing.cast("type[Any]", hint), value, at=at + ".")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as err:
            raise ConfigError(f"{at} = {shown(value)} is larger than any number here can be.") from err
    if isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise ConfigError(f"{at} = {shown(value)} must be {names.get(hint, hint)}.")

"""Settings of an experiment by path, as `--set` changes them: `reveal`, `ftml.inner_lr`, `network.filters`, `order`."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from metaleader.experiments.experiment import ALL, GROUPS, Experiment
from metaleader.learners import Learner
from metaleader.learners.ftml import STEP_OPTIONS
from metaleader.methods import Method
from metaleader.system.builders import (
    arguments_of,
    explained,
    settable,
    takes_any,
    unknown,
    with_arguments,
)

# The fields of an experiment that are numbers or lists of numbers.
SIZES = ("tasks", "order", "meta_steps", "reveal", "reveals", "gamma", "panels", "steps", "measure_at", "before_at")
SIZES += ("error_name", "threads")
# Arguments that the run passes, and those that no text can express.
_RUN = {"seed": "--first-seed and --seeds", "data": "--data", "device": "--device", "engine": "--engine"}
_RUN |= {"shards": "--shards"}
_FUNCTIONS = ("model", "loss")


def parse_setting(text: str) -> tuple[str, Any]:
    """The path and value of "path=value"; the value is JSON, a Python literal, or else a string.

    >>> parse_setting("ftml.inner_lr=1e-2"), parse_setting("order=colour"), parse_setting("steps=[5, 1]")
    (('ftml.inner_lr', 0.01), ('order', 'colour'), ('steps', [5, 1]))
    """
    path, equals, value = (part.strip() for part in text.partition("="))
    if not path or not equals:
        raise ValueError(f"--set {text}: write NAME=VALUE, such as --set ftml.inner_lr=0.02")
    for read in (json.loads, ast.literal_eval):
        try:
            return path, read(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return path, value


def with_settings(experiment: Experiment, texts: Iterable[str], methods: Sequence[str]) -> Experiment:
    """The experiment with settings changed.

    Args:
        experiment: the experiment; it is not changed.
        texts: settings as "path=value". `all.NAME` concerns every method that has the setting; settings of single
            methods override it.
        methods: the methods that are run.

    Raises:
        ValueError: for an unknown path, one that is given twice, or a value of another kind.
    """
    texts = list(texts)
    if not texts:
        return experiment
    sizes: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {name: {} for name in (*GROUPS, ALL, *methods)}
    seen: set[str] = set()
    for text in texts:
        path, value = parse_setting(text)
        group, name, old = find_setting(experiment, path, methods, f"--set {text}")
        if (path := f"{group}.{name}" if group else name) in seen:
            raise ValueError(f"--set {text}: {path} is set twice; leave one out")
        seen.add(path)
        _check_kind(f"--set {text}", path, old, value)
        (groups[group] if group else sizes)[name] = value
    for group in GROUPS:
        changed = with_arguments(getattr(experiment, group), groups[group])
        experiment = replace(experiment, **{group: changed})
    changed_methods = {}
    for name in methods if groups[ALL] else [name for name in methods if groups[name]]:
        takes = method_settings(experiment, name) if groups[ALL] else {}
        shared = {option: value for option, value in groups[ALL].items() if option in takes}
        if options := shared | groups[name]:
            changed_methods[name] = experiment.all_methods[name].with_options(options)
    for kind in ("methods", "extras"):
        given = getattr(experiment, kind)
        experiment = replace(experiment, **{kind: {name: changed_methods.get(name, m) for name, m in given.items()}})
    return _with_sizes(experiment, sizes)


def settings_of(experiment: Experiment, methods: Sequence[str]) -> dict[str, Any]:
    """All settings by path, with their values."""
    found: dict[str, Any] = {name: getattr(experiment, name) for name in SIZES}
    for group in GROUPS:
        found |= {f"{group}.{name}": value for name, value in group_settings(experiment, group).items()}
    for method in methods:
        found |= {f"{method}.{name}": value for name, value in method_settings(experiment, method).items()}
    return found


def group_settings(experiment: Experiment, group: str) -> dict[str, Any]:
    """The settings of the network, the stream or the loss: keyword arguments with a value."""
    function = getattr(experiment, group)
    values = arguments_of(function)
    required = dict.fromkeys(settable(function)) if group != "loss" else {}
    return {name: value for name, value in (required | values).items() if name not in _RUN}


def method_settings(experiment: Experiment, name: str) -> dict[str, Any]:
    """The settings of a method: the options of its learner, with those given in the experiment.

    The fields of an option that is a dataclass are settings too, such as `adaptation.scale`.
    """
    method = experiment.all_methods[name]
    values = dict.fromkeys(settable(method.make)) | arguments_of(method.make)
    kind = method.make
    if takes_any(kind) and not (isinstance(kind, type) and issubclass(kind, Learner)):
        with explained(f"method {name!r} cannot be made"):
            kind = type(method(experiment.network, experiment.loss, meta_steps=experiment.meta_steps))
    if takes_any(method.make) and isinstance(kind, type) and issubclass(kind, Learner):
        values |= {option.name: option.default for option in fields(kind.Options)}
    values |= {"meta_steps": experiment.meta_steps} if "meta_steps" in values else {}
    values.pop("data_folder", None)  # a place, as `device`, unless the experiment names one
    values = {n: v for n, v in (values | method.options).items() if n not in (*_RUN, *_FUNCTIONS)}
    if values.get("adaptation") is not None:
        values = {n: v for n, v in values.items() if n not in STEP_OPTIONS}
    for option, value in list(values.items()):
        if is_dataclass(value) and not isinstance(value, type):
            values |= {f"{option}.{field.name}": getattr(value, field.name) for field in fields(value) if field.init}
    return values


def find_setting(experiment: Experiment, path: str, methods: Sequence[str], where: str) -> tuple[str, str, Any]:
    """The group of a path ("" for sizes), the name in it, and the present value.

    A path without a dot is a size of the experiment, else a setting of the stream, else one of all methods.
    """
    group, dot, name = path.partition(".")
    if not dot:
        stream = group_settings(experiment, "stream")
        # Many streams have an order of their own.
        if path in SIZES and not (path == "order" and path in stream):
            return "", path, getattr(experiment, path)
        if path in stream or (path not in _RUN and takes_any(experiment.stream)):
            return "stream", path, stream.get(path)
        takes = [] if path in _RUN else [method_settings(experiment, method) for method in methods]
        for options in takes:
            if path in options:
                return ALL, path, options[path]
        names = [*SIZES, *stream, *(f"{group}.NAME" for group in (*GROUPS, ALL, *methods))]
        names += dict.fromkeys(option for options in takes for option in options)
        raise ValueError(f"{where}: {_refusal('setting', path, names)}")
    if group == ALL:
        takes = [method_settings(experiment, method) for method in methods]
        names = list(dict.fromkeys(option for options in takes for option in options))
        if name not in names:
            raise ValueError(f"{where}: {_refusal('setting of methods', name, names)}")
        return ALL, name, next(options[name] for options in takes if name in options)
    if group in GROUPS:
        values, function = group_settings(experiment, group), getattr(experiment, group)
        if name not in values and (name in _RUN or not takes_any(function)):
            raise ValueError(f"{where}: {_refusal(f'setting of the {group}', name, list(values))}")
        return group, name, values.get(name)
    if group not in methods:
        if group in experiment.all_methods:
            raise ValueError(f"{where}: {group} is not run; name it with --methods, or leave the setting out")
        raise ValueError(f"{where}: {unknown('method or group', group, [*methods, ALL, *GROUPS])}")
    values = method_settings(experiment, group)
    method: Method = experiment.all_methods[group]
    open_ended = takes_any(method.make) and "meta_lr" not in values
    if name not in values and (name in _RUN or name in _FUNCTIONS or not open_ended):
        raise ValueError(f"{where}: {_refusal(f'setting of {group}', name, list(values))}")
    return group, name, values.get(name)


def _refusal(kind: str, name: str, names: Sequence[str]) -> str:
    if name in _RUN:
        return f"{name} is an option of the run; use {_RUN[name]}"
    return unknown(kind, name, names) if names else f"unknown {kind} {name!r}: there are none"


def _check_kind(where: str, path: str, old: Any, new: Any) -> None:
    """Refuse text for a number, and the like; other values are checked where they are used."""
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    before, after = kinds.get(type(old)), kinds.get(type(new))
    if before is not None and after is not None and before != after:
        raise ValueError(f"{where}: {path} is {before}, now {json.dumps(old)}; got {json.dumps(new)}")


def _with_sizes(experiment: Experiment, sizes: Mapping[str, Any]) -> Experiment:
    if not sizes:
        return experiment
    changed: dict[str, Any] = dict(sizes)
    if {"reveal", "reveals", "measure_at"} & sizes.keys():
        if not {"reveal", "reveals"}.isdisjoint(sizes):
            changed.setdefault("measure_at", ())
        reveal, reveals = (sizes.get(name, getattr(experiment, name)) for name in ("reveal", "reveals"))
        given = changed["measure_at"] if isinstance(changed["measure_at"], list | tuple) else ()
        if isinstance(reveal, int) and isinstance(reveals, int) and reveal > 0:
            measured = given or range(reveal, reveal * reveals + 1, reveal)
            for name, default in (("panels", ()), ("before_at", None)):
                if name not in sizes and any(size not in measured for size in getattr(experiment, name) or ()):
                    changed[name] = default  # the given sizes are no longer measured
    texts = ", ".join(f"{name}={json.dumps(value)}" for name, value in sizes.items())
    try:
        return replace(experiment, **changed)
    except ValueError as error:
        raise ValueError(f"--set {texts}: {error}") from error

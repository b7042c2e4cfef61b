"""Entry points of roles: read and checked without importing the user's modules."""

from __future__ import annotations

import ast
import importlib.machinery
import re
import shlex
from pathlib import Path

from dlrover._util import modules
from dlrover.errors import ConfigurationError
from dlrover.roles.spec import EntryForm, EntryPoint
from dlrover.spec.words import did_you_mean

_NAME = r"[A-Za-z_]\w*"
_DOTTED = rf"{_NAME}(\.{_NAME})*"


def entry_point(role: str, text: str, directory: Path) -> EntryPoint:
    """Return the entry point that ``text`` names; scripts and modules are found in ``directory``.

    Raises:
        ConfigurationError: it is malformed or does not exist.
    """
    words = shlex.split(str(text))
    if words and words[0].endswith(".py"):
        path = directory / words[0]
        if not path.is_file():
            raise ConfigurationError(
                f"role {role}: entry {words[0]}: the script does not exist (looked in {directory})."
            )
        return EntryPoint(EntryForm.SCRIPT, str(path), tuple(words[1:]))
    if len(words) == 1 and re.fullmatch(rf"{_DOTTED}:{_NAME}", words[0]):
        module, _, name = words[0].partition(":")
        _check_module(role, module, name, directory)
        return EntryPoint(EntryForm.OBJECT, words[0])
    if len(words) == 1 and re.fullmatch(rf"{_NAME}\.{_DOTTED}", words[0]):
        module, _, function = words[0].rpartition(".")
        _check_module(role, module, function, directory)
        return EntryPoint(EntryForm.FUNCTION, words[0])
    raise ConfigurationError(
        f"role {role}: entry {text!r}: must be a script as 'train.py --lr 0.1', an object as 'module:Class' or "
        "a function as 'module.function'."
    )


def _check_module(role: str, module: str, name: str, directory: Path) -> None:
    """Refuse a module that is not found, or one in Python source that does not define ``name``."""
    path: list[str] | None = None
    spec = None
    for part in _prefixes(module):
        if path is None:
            spec = modules.find_top_level(part, str(directory))
        else:
            spec = importlib.machinery.PathFinder.find_spec(part, path)
        if spec is None:
            raise ConfigurationError(
                f"role {role}: entry {module}: there is no module {part} (looked in {directory} and where Python "
                "finds modules)."
            )
        path = list(spec.submodule_search_locations or ())
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    defined = _defined(Path(spec.origin))
    if name not in defined and "*" not in defined:
        hint = did_you_mean(name, defined)
        raise ConfigurationError(f"role {role}: entry: module {module} has no {name}.{hint}")


def _prefixes(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _defined(path: Path) -> set[str]:
    """Return the names that a module may define at its top level; ``*`` if any."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise ConfigurationError(f"{path}:{error.lineno}: {error.msg}.") from error
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
    return found

"""What this process lets other roles call."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from dlrover.errors import ConfigurationError

_MARK = "_dlrover_rpc"
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Marked:
    """How a function may be called."""

    name: str = ""
    idempotent: bool = False
    concurrent: bool = False


@dataclass(frozen=True)
class ExportedMethod:
    """A function that others may call."""

    function: Callable[..., Any]
    idempotent: bool
    concurrent: bool


class Exports:
    """Functions by name."""

    def __init__(self) -> None:
        self._functions: dict[str, ExportedMethod] = {}
        self._lock = threading.Lock()
        self.changed: Callable[[], None] | None = None
        """Called after a change."""

    def add(self, name: str, function: Callable[..., Any], marked: Marked) -> None:
        """Let others call a function, in the place of an earlier one of the same module and name.

        Raises:
            ConfigurationError: Another function has the name.
        """
        with self._lock:
            known = self._functions.get(name)
            if known is not None and _home(known.function) != _home(function):
                raise ConfigurationError(
                    f"Both {_home(known.function)} and {_home(function)} are exported as {name}; give one another"
                    " name: @rpc(name=...)."
                )
            self._functions[name] = ExportedMethod(function, marked.idempotent, marked.concurrent)
        if self.changed is not None:
            self.changed()

    def add_object(self, served: object) -> None:
        """Let others call the methods of an object: those with `rpc`, or all public ones if none has it."""
        methods = {
            name: getattr(served, name)
            for name, _ in inspect.getmembers(type(served), callable)
            if not name.startswith("_")
        }
        marked = {name: method for name, method in methods.items() if _marked(method) is not None}
        if not methods:
            raise ConfigurationError(
                f"{type(served).__qualname__} has no public method; other roles have nothing to call."
            )
        changed, self.changed = self.changed, None
        try:
            for name, method in (marked or methods).items():
                how = _marked(method) or Marked()
                self.add(how.name or name, method, how)
        finally:
            self.changed = changed
        if changed is not None:
            changed()

    def get(self, name: str) -> ExportedMethod | None:
        """Return a function."""
        return self._functions.get(name)

    def table(self) -> dict[str, bool]:
        """Return the names; True for idempotent functions."""
        with self._lock:
            return {name: one.idempotent for name, one in sorted(self._functions.items())}


exports = Exports()
"""Those of this process."""


@overload
def rpc(function: Function, /) -> Function: ...
@overload
def rpc(
    *, name: str = "", idempotent: bool = False, concurrent: bool = False
) -> Callable[[Function], Function]: ...
def rpc(
    function: Any = None,
    /,
    *,
    name: str = "",
    idempotent: bool = False,
    concurrent: bool = False,
) -> Any:
    """Mark a method or a function that other roles may call. A function of a module is exported at once.

    Args:
        function: The function, where the decorator is used without arguments.
        name: Its name for others, if another one.
        idempotent: It may run twice: a call whose member dies is made again.
        concurrent: It may run beside others, in a thread of its own; otherwise calls run one after the other.
    """

    def mark(marked: Any) -> Any:
        how = Marked(name, idempotent, concurrent)
        setattr(marked, _MARK, how)
        if marked.__qualname__ == marked.__name__:
            exports.add(name or marked.__name__, marked, how)
        return marked

    return mark if function is None else mark(function)


def _marked(function: Any) -> Marked | None:
    return getattr(function, _MARK, None)


def _home(function: Any) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"

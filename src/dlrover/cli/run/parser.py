"""argparse with torchrun's habits: two spellings of an option, ``PET_`` defaults, abbreviations."""

from __future__ import annotations

import argparse
import copy
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from dlrover.errors import ConfigurationError

NEARNESS = 0.7
"""Similarity, between 0 and 1, above which an option is suggested for an unknown one."""


class LaunchParser(argparse.ArgumentParser):
    """Parser that raises `ConfigurationError` instead of exiting, and keeps torchrun's abbreviations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.own_options: set[str] = set()
        """Names of the options that torchrun does not have."""
        self.set_by_environ: set[str] = set()
        """Names of the options that an environment variable sets."""

    def error(self, message: str) -> NoReturn:
        """Raise ``message``, followed by a pointer to ``--help``."""
        raise ConfigurationError(f"{message}; see {self.prog} --help")

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse as argparse does; report a wrong value from the environment only if it is used."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown_option(unknown[0]))
        for value in vars(parsed).values():
            if isinstance(value, _BadDefault):
                self.error(value.message)
        return parsed

    def misspelt(self, environ: Mapping[str, str]) -> list[str]:
        """Return a sentence for each ``PET_`` variable that sets no option but nearly has an option's name."""
        known = {f"PET_{action.dest.upper()}" for action in self._actions}
        unknown = [name for name in environ if name.startswith("PET_") and name not in known]
        near = ((name, difflib.get_close_matches(name, known, 1, NEARNESS)) for name in unknown)
        return [
            f"{name} has no effect: no option has this name; did you mean {found[0]}?"
            for name, found in near
            if found
        ]

    def _unknown_option(self, text: str) -> str:
        option = text.partition("=")[0]
        alike = _most_alike(option, [flag for flag in self._option_string_actions if flag[2:]])
        hint = f" (did you mean {alike}?)" if alike else ""
        return f"unknown option {option}{hint}"

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # argparse calls this for an option that is not spelled out. An option that only DLRover has,
        # or the second spelling of an option, must not make torchrun's abbreviations ambiguous.
        matches: list[Any] = super()._get_option_tuples(option_string)
        of_torchrun = [match for match in matches if match[0].dest not in self.own_options]
        unique: dict[str, Any] = {}
        for match in of_torchrun or matches:
            unique.setdefault(match[0].dest, match)
        if len(unique) < 2:
            return list(unique.values())
        names = ", ".join(match[1] for match in unique.values())
        message = f"ambiguous option: {option_string} could match {names}"
        _, *rest = next(iter(unique.values()))
        return [(_Ambiguous(message), *rest)]


class OptionGroup:
    """Options under one heading of the help text, with both spellings and ``PET_`` defaults."""

    def __init__(
        self,
        parser: LaunchParser,
        environ: Mapping[str, str],
        title: str,
        *,
        own: bool = False,
    ) -> None:
        self.environ = environ
        self._parser = parser
        self._group = parser.add_argument_group(title)
        self._own = own

    def add_positional(self, name: str, **settings: Any) -> None:
        """Add a positional argument; ``settings`` are argparse's."""
        action = self._group.add_argument(name, type=str, **settings)
        # Some versions of argparse report even the rest of the line as missing.
        action.required = action.nargs != argparse.REMAINDER

    def add(
        self,
        *flags: str,
        kind: Callable[[str], Any] = str,
        from_environ: bool = True,
        **settings: Any,
    ) -> None:
        """Add an option with a value; ``settings`` are argparse's."""
        action = self._group.add_argument(*_spellings(flags), action=_Set, type=kind, **settings)
        self._register(action, kind if from_environ else None)

    def add_switch(self, *flags: str, help: str) -> None:  # noqa: A002
        """Add an option without a value: off unless it is given or its variable is not 0."""
        action = self._group.add_argument(
            *_spellings(flags), action=_Set, nargs=0, const=True, default=False, help=help
        )
        self._register(action, _switch_value)

    def _register(self, action: argparse.Action, kind: Callable[[str], Any] | None) -> None:
        if self._own:
            self._parser.own_options.add(action.dest)
        variable = f"PET_{action.dest.upper()}"
        if kind is None or variable not in self.environ:
            return
        self._parser.set_by_environ.add(action.dest)
        action.default = _from_environ(action, kind, variable, self.environ[variable])


class HelpFormatter(argparse.HelpFormatter):
    """Formatter that lists one spelling of each option."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [flag for flag in action.option_strings if "_" not in flag]
        return super()._format_action_invocation(shown)


class _Set(argparse.Action):
    """Action that stores the value, or a switch's constant, and adds the option to ``given``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        namespace.given |= {self.dest}


class _Ambiguous(argparse.Action):
    """Action of an abbreviation of several options.

    argparse looks at every argument before it takes one, and those of the training program may look like such
    an abbreviation: it is a mistake only if argparse takes it.
    """

    def __init__(self, message: str) -> None:
        super().__init__([], argparse.SUPPRESS, nargs="?")
        self._message = message

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(self._message)


class _BadDefault:
    """Value from the environment that its option does not accept.

    It becomes an error only if it is used: the command line may set the option, or ask for help.
    """

    def __init__(self, text: str, message: str) -> None:
        self.text = text
        self.message = message

    def __str__(self) -> str:
        return self.text


def _spellings(flags: Sequence[str]) -> list[str]:
    """Return ``flags``; each one with inner dashes is followed by its spelling with underscores."""
    both = ((flag, "--" + flag[2:].replace("-", "_")) if flag[2:] else (flag,) for flag in flags)
    return [spelling for pair in both for spelling in dict.fromkeys(pair)]


def _from_environ(
    action: argparse.Action, kind: Callable[[str], Any], variable: str, text: str
) -> Any:
    """Return ``text`` as a value of ``action``, or the error to report if it is used."""
    flag = next(option for option in action.option_strings if option.startswith("--"))
    subject = f"{variable}={text!r} is not a value for {flag}"
    try:
        value = kind(text)
    except ValueError:
        wanted = "a number" if kind is float else "a whole number"
        if action.nargs == 0:
            wanted = "1 (on) or 0 (off)"
        return _BadDefault(text, f"{subject}, which takes {wanted}")
    if action.choices is not None and value not in action.choices:
        choices = ", ".join(map(str, action.choices))
        return _BadDefault(text, f"{subject}, which takes one of {choices}")
    return value


def _most_alike(option: str, flags: Sequence[str]) -> str:
    """Return the flag that ``option`` most resembles; empty if none is near."""
    wanted = option.lstrip("-").replace("_", "-")
    matcher = difflib.SequenceMatcher(b=wanted)

    def similarity(flag: str) -> float:
        # Compare with the flag's start too: people leave out the end of a name, as in --nproc.
        ratios = []
        for name in (flag[2:], flag[2:][: len(wanted)]):
            matcher.set_seq1(name)
            ratios.append(matcher.ratio())
        return max(ratios)

    best = max(flags, key=similarity)
    return best if len(wanted) > 1 and similarity(best) > NEARNESS else ""


def _switch_value(text: str) -> bool:
    return bool(int(text))

"""Why Ray, or a cluster, turns a process away or ends an actor: its messages in our words."""

from __future__ import annotations

import re

from dlrover.errors import ConfigurationError

OLDEST = 2, 50
"""Oldest version of Ray that has what nodes need, such as labels for placement groups."""
MOST_WORDS = 400
"""Characters kept of Ray's reason for an actor's death."""
_NOT_BEGUN = "Initialization failure from server"
"""How Ray Client's error begins when a server of another version cannot read what this process sends."""
_VERSION = re.compile(rb"\x12([\x05-\x1f])(\d+\.\d+\.\d[\w.+-]*)")
_OF_REMOVALS = "it was killed by `ray.kill`", "The actor died because its node has died"
"""How Ray's reasons begin for an actor that something else ended."""
_OF_TOKENS = "uthentication token", "AuthToken", "Unauthenticated"
"""Words in Ray's errors about tokens."""


def why_died(message: str) -> str:
    """Return the reason in Ray's message about a dead actor, on one line and without its list of ids."""
    lines = [line.strip() for line in message.splitlines()]
    kept = [line for line in lines if line and not _is_field(line)]
    said = " ".join(kept).partition(" Some common causes include")[0].rstrip(".")
    for opening in (
        "The actor died unexpectedly before finishing this task.",
        "The actor is dead because",
    ):
        said = said.removeprefix(opening).strip()
    return said[:MOST_WORDS] or "Ray gives no reason"


def is_removal(why: str) -> bool:
    """Return whether an actor that died for this reason was killed by name, or died with its machine."""
    return why.startswith(_OF_REMOVALS)


def _is_field(line: str) -> bool:
    name, colon, _ = line.partition(":")
    return bool(colon) and name.isidentifier() and name.islower()


def is_about_tokens(message: str) -> bool:
    """Return whether an error of Ray says that a token is missing or wrong."""
    return any(words in message for words in _OF_TOKENS)


def why_unauthenticated(address: str, mode: str, *, has_token: bool) -> str:
    """Return, in one sentence, why a cluster turns this process away, and what to do.

    Args:
        address: As given; empty: the one that Ray finds.
        mode: ``RAY_AUTH_MODE``; empty: not set.
        has_token: This process has a token.
    """
    if mode == "disabled":
        why = "the cluster asks for a Ray token, and RAY_AUTH_MODE is disabled here"
    elif has_token:
        why = "the cluster refuses the Ray token of this environment"
    else:
        why = "the cluster asks for a Ray token, and this environment has none"
    return (
        f"{_place(address)}: {why}; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the cluster's token or"
        " RAY_AUTH_TOKEN_PATH to a file with it."
    )


def _place(address: str) -> str:
    return f"--ray-address {address}" if address else "The Ray cluster"


def check_version(version: str, install: str) -> None:
    """Refuse a version of Ray that lacks what nodes need; ``install`` is the command that brings another one.

    Raises:
        ConfigurationError: it is one.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise ConfigurationError(
            f"--platform ray needs Ray {OLDEST[0]}.{OLDEST[1]} or later, and this environment has Ray {version}:"
            f" {install}, also on the machines of the cluster."
        )


def version_in(body: bytes) -> str:
    """Return the version of Ray in a cluster's answer to ``CheckAlive``, its second field; empty if it has none."""
    found = _VERSION.search(body)
    size, version = (found[1][0], found[2]) if found else (0, b"")
    return version.decode() if len(version) == size else ""


def why_other(address: str, theirs: str, ours: str) -> str:
    """Return, in one sentence, that a cluster runs other versions than this environment has."""
    return f"{_place(address)}: the cluster runs {theirs} and this environment has {ours}; both must be the same."


def why_refused(address: str, message: str, ours: str = "") -> str:
    """Return, in one sentence, why a cluster cannot be used.

    Args:
        address: As given; empty: the one that Ray finds.
        message: What Ray says.
        ours: The versions of this environment, in words.
    """
    place = _place(address)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    versions = [line for line in lines if line.startswith(("Ray:", "Python:"))]
    if "ersion mismatch" in message and len(versions) >= 4:
        theirs, here = (" ".join(versions[n : n + 2]).replace(": ", " ") for n in (0, 2))
        return why_other(address, theirs, here)
    if message.startswith(_NOT_BEGUN):
        return (
            f"{place}: the cluster cannot begin to serve this command ({lines[-1].rstrip('.')}); it must run"
            f" {ours or 'the same versions of Ray and Python'}, as this environment does."
        )
    first = lines[0].rstrip(".") if lines else "no answer"
    return f"{place}: no Ray cluster can be reached ({first}); it takes HOST:PORT, ray://HOST:PORT or auto."

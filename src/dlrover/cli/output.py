"""Output forms of the ``dlrover`` commands."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import msgspec
import typer


class Form(str, Enum):
    """Form of a command's output."""

    TEXT = "text"
    JSON = "json"


Output = Annotated[Form, typer.Option("--output", "-o", help="Form of the output.")]


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode())

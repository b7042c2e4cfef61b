"""The form in which the verbs of ``dlrover`` print what they have to say."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import msgspec
import typer


class Form(str, Enum):
    """How a verb prints what it has to say."""

    TEXT = "text"
    JSON = "json"


Output = Annotated[Form, typer.Option("--output", "-o", help="Form of the output.")]


def print_json(value: Any) -> None:
    """Print what msgspec can encode, indented."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode())

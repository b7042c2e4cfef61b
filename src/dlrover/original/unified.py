"""The original's unified API: what describes a job of several roles."""

from __future__ import annotations

import argparse
import enum
from typing import Any

from dlrover.errors import ConfigurationError


class RLRoleType(str, enum.Enum):
    """Names of roles."""

    TRAINER = "TRAINER"
    ACTOR = "ACTOR"
    ROLLOUT = "ROLLOUT"
    REFERENCE = "REFERENCE"
    REWARD = "REWARD"
    CRITIC = "CRITIC"


class DLJobBuilder:
    """A builder of jobs that no program can make."""

    def __init__(self) -> None:
        raise ConfigurationError(
            f"{type(self).__name__} does not exist here: write the job's roles with dlrover.roles.Job(name).role(...), and"
            " start it with dlrover roles."
        )


class RLJobBuilder(DLJobBuilder):
    """The same, for the roles of reinforcement learning."""


def args_2_omega_conf(args: argparse.Namespace) -> Any:
    """Return parsed arguments as a configuration of OmegaConf."""
    from omegaconf import OmegaConf  # noqa: PLC0415 - the program's own

    return OmegaConf.create(vars(args))


def omega_conf_2_args(conf: Any) -> argparse.Namespace:
    """Return a configuration of OmegaConf as parsed arguments."""
    return argparse.Namespace(**conf)

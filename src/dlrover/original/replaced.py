"""The original's logger, and its names that do nothing here: its extensions for failures, its synchronization."""

from __future__ import annotations

import abc
import enum
import logging
from dataclasses import dataclass, field
from typing import Any

from dlrover.errors import ConfigurationError


def _logger() -> logging.Logger:
    logger = logging.getLogger("dlrover.logger")
    form = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter(form))
    logger.handlers, logger.propagate = [shown], False
    logger.setLevel(logging.INFO)
    return logger


default_logger = _logger()
"""The logger of scripts: it shows infos on standard error, as in the original, whatever ``logging`` is set to."""


class FailoverStrategy(enum.Enum):
    """What follows from a failure."""

    NORMAL_FAILOVER = "normal"
    NODE_FAILOVER = "node"
    GLOBAL_FAILOVER = "global"
    ABORTION_FAILOVER = "abortion"


@dataclass
class FailureInfo:
    """A failure."""

    timestamp: int = 0
    log_content: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class AgentFailureInfo(FailureInfo):
    """A failure on a node."""

    node_rank: int = -1


class DynamicFailoverExtension(abc.ABC):
    """Base of the extensions. None is ever called: the setting ``diagnosis_rules`` has rows for causes of one's own."""

    @abc.abstractmethod
    def get_user_failover_strategy(self, failure_info: Any) -> FailoverStrategy:
        """Return what follows from a failure."""


class DynamicAgentFailoverExtension(DynamicFailoverExtension):
    """An extension of the agent."""


class ManagerExtension(abc.ABC):  # noqa: B024 - a base of the original
    """Base of the extensions of the unified API's master. None is ever called."""


class SyncClient:
    """A client for synchronization through the master, which never worked in the original."""

    def __init__(self) -> None:
        raise ConfigurationError(
            "SyncClient does not exist here: use torch.distributed.barrier(), or a TensorFlow cluster's own"
            " coordination; parameter servers are replaced without help from the program (docs/tensorflow.md)."
        )

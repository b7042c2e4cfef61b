"""The original's names that do nothing here: its logger, its extensions for failures, its synchronization."""

from __future__ import annotations

import abc
import enum
import logging
from dataclasses import dataclass, field
from typing import Any

from dlrover.errors import ConfigurationError

default_logger = logging.getLogger("dlrover")
"""The logger of the package. It prints nothing below a warning unless the program configures ``logging``."""


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

"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.events import (
    DLRoverAgentEvent,
    DLRoverMasterEvent,
    TrainerProcess,
    WarningType,
)

__all__ = ["DLRoverAgentEvent", "DLRoverMasterEvent", "TrainerProcess", "WarningType"]

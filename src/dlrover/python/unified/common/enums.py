"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.unified import RLRoleType

__all__ = ["RLRoleType"]

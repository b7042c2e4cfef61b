"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.tensorflow import ConfigurationManagerInterface, ConfigurationManagerMeta

__all__ = ["ConfigurationManagerInterface", "ConfigurationManagerMeta"]

"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.replaced import AgentFailureInfo, DynamicAgentFailoverExtension

__all__ = ["AgentFailureInfo", "DynamicAgentFailoverExtension"]

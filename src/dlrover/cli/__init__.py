"""The commands ``dlrover-run`` and ``dlrover``."""

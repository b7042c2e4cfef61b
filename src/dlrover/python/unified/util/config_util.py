"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.unified import args_2_omega_conf, omega_conf_2_args

__all__ = ["args_2_omega_conf", "omega_conf_2_args"]

"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.runtime import (
    DataQueue,
    FutureSequence,
    RoleActor,
    RoleGroup,
    create_rpc_proxy,
    current_worker,
    export_rpc_instance,
    export_rpc_method,
    patch_dataloader_ray,
    rpc,
)

__all__ = [
    "DataQueue",
    "FutureSequence",
    "RoleActor",
    "RoleGroup",
    "create_rpc_proxy",
    "current_worker",
    "export_rpc_instance",
    "export_rpc_method",
    "patch_dataloader_ray",
    "rpc",
]

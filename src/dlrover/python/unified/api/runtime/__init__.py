"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.runtime import (
    ActorInfo,
    DataQueue,
    FutureSequence,
    JobInfo,
    PrimeMasterApi,
    RayDataLoaderIter,
    RoleActor,
    RoleGroup,
    UserRpcProxy,
    Worker,
    create_rpc_proxy,
    current_worker,
    export_rpc_instance,
    export_rpc_method,
    patch_dataloader_ray,
    rpc,
)

__all__ = [
    "ActorInfo",
    "DataQueue",
    "FutureSequence",
    "JobInfo",
    "PrimeMasterApi",
    "RayDataLoaderIter",
    "RoleActor",
    "RoleGroup",
    "UserRpcProxy",
    "Worker",
    "create_rpc_proxy",
    "current_worker",
    "export_rpc_instance",
    "export_rpc_method",
    "patch_dataloader_ray",
    "rpc",
]

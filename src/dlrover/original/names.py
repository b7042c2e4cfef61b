"""The one table of the original's names: where each was, what stands for it here, and what a new program writes.

``scripts/original-names`` makes the packages ``dlrover.trainer`` and ``dlrover.python`` and the table of
docs/from-dlrover.md from it.
"""

from __future__ import annotations

from typing import NamedTuple


class Module(NamedTuple):
    """A module of the original."""

    name: str
    names: dict[str, str]
    """By name: the door that a new program uses, for people to read."""
    home: str
    """Module here that has these names."""


class MainModule(NamedTuple):
    """A module of the original that is run, with ``python -m``."""

    name: str
    door: str
    """Command that a new program uses."""
    runs: str
    """Function here that runs it, as ``module:function``: ours, or one that says what to run instead."""
    arguments: str = ""
    """Function here that turns its arguments into ours."""


_FLASH = "dlrover.trainer.torch.flash_checkpoint"
_AGENT = "dlrover.python.elastic_agent"
_UNIFIED = "dlrover.python.unified"
_ORIGINAL = "dlrover.original"

_STORAGE_TYPE = {"StorageType": '`to="memory"` or `to="storage"` of `Checkpointer.save`'}
_CHECKPOINTER = "`dlrover.checkpoint.Checkpointer`"
_DELETION = {
    "CheckpointDeletionStrategy": "`dlrover.checkpoint.KeepLast`, `KeepEvery`, `KeepBest`",
    "KeepLatestStepStrategy": "`dlrover.checkpoint.KeepLast`",
    "KeepStepIntervalStrategy": "`dlrover.checkpoint.KeepEvery`",
}
_LOGGER = {"default_logger": "`logging.getLogger(__name__)`"}
_MEGATRON = {
    "load_checkpoint": "`dlrover.integrations.megatron.FlashLoad`",
    "save_checkpoint": "`dlrover.integrations.megatron.FlashSave`",
    **_STORAGE_TYPE,
}
_BUILDER = {"DLJob": "`dlrover.roles.Job`", "DLJobBuilder": "`dlrover.roles.Job`"}
_RULES = "the setting `diagnosis_rules`"
_WORKER = {
    "ActorInfo": "`dlrover.roles.current_worker`",
    "JobInfo": "`dlrover.roles.current_worker`",
    "Worker": "`dlrover.roles.current_worker`",
    "current_worker": "`dlrover.roles.current_worker`",
}
_RUNTIME = {
    **_WORKER,
    "DataQueue": "`dlrover.roles.Queue`",
    "FutureSequence": "`dlrover.roles.runtime.groups.FutureSequence`",
    "PrimeMasterApi": "an error: `dlrover.roles.RoleGroup`",
    "RoleActor": "`dlrover.roles.RoleGroup.call_member`",
    "RoleGroup": "`dlrover.roles.RoleGroup`",
    "UserRpcProxy": "an error: `dlrover.roles.RoleGroup`",
    "create_rpc_proxy": "an error: `dlrover.roles.RoleGroup`",
    "export_rpc_instance": "`dlrover.roles.current_worker().serve`",
    "export_rpc_method": "`dlrover.roles.rpc`",
    "rpc": "`dlrover.roles.rpc`",
}
_RAY_LOADER = {
    "RayDataLoaderIter": "an error: `torch.utils.data.DataLoader`",
    "patch_dataloader_ray": "nothing: the workers of a loader need no patch",
}

MODULES = (
    Module(f"{_FLASH}.checkpointer", {
        "Checkpointer": _CHECKPOINTER, **_STORAGE_TYPE,
    }, f"{_ORIGINAL}.checkpoint"),
    Module(f"{_FLASH}.ddp", {"DdpCheckpointer": _CHECKPOINTER, **_STORAGE_TYPE}, f"{_ORIGINAL}.checkpoint"),
    Module(f"{_FLASH}.fsdp", {
        "FsdpCheckpointer": "`dlrover.integrations.dcp`",
        "FsdpDcpCheckpointer": "`dlrover.integrations.dcp`",
        "FsdpFullCheckpointer": _CHECKPOINTER,
        "FsdpShardCheckpointer": _CHECKPOINTER,
        **_STORAGE_TYPE,
    }, f"{_ORIGINAL}.fsdp"),
    Module(f"{_FLASH}.deepspeed", {
        "DeepSpeedCheckpointer": "`dlrover.integrations.deepspeed.attach`", **_STORAGE_TYPE,
    }, f"{_ORIGINAL}.deepspeed"),
    Module(f"{_FLASH}.hf_trainer", {
        "FlashCkptTrainer": "`dlrover.integrations.transformers.FlashCallback`",
    }, f"{_ORIGINAL}.transformers"),
    Module(f"{_FLASH}.megatron", _MEGATRON, f"{_ORIGINAL}.checkpoint"),
    Module(f"{_FLASH}.megatron_dist_ckpt", _MEGATRON, f"{_ORIGINAL}.checkpoint"),
    Module("dlrover.trainer.torch.elastic.dataloader", {
        "ElasticDataLoader": "`dlrover.data.ElasticDataLoader`",
    }, f"{_ORIGINAL}.training"),
    Module("dlrover.trainer.torch.elastic.sampler", {
        "ElasticDistributedSampler": "`dlrover.training.ElasticDistributedSampler`",
    }, f"{_ORIGINAL}.training"),
    Module("dlrover.trainer.torch.elastic.trainer", {
        "ElasticTrainer": "`dlrover.training.ElasticTrainer`",
    }, f"{_ORIGINAL}.training"),
    Module("dlrover.trainer.tensorflow.reader.base_reader", {
        "ElasticReader": "`dlrover.data.Records`, `dlrover.tensorflow.dataset`",
    }, f"{_ORIGINAL}.tensorflow"),
    Module("dlrover.trainer.tensorflow.reader.file_reader", {
        "FileReader": "`dlrover.data.Lines`, `dlrover.data.Csv`",
    }, f"{_ORIGINAL}.tensorflow"),
    Module("dlrover.trainer.tensorflow.util.column_info", {
        "Column": "`tf.TensorSpec` for `dlrover.tensorflow.dataset`",
    }, f"{_ORIGINAL}.tensorflow"),
    Module("dlrover.trainer.tensorflow.hooks.elastic_data_shard_report_hook", {
        "ElasticDataShardReportHook": "nothing: `dlrover.tensorflow.estimators` reports by itself",
    }, f"{_ORIGINAL}.tensorflow"),
    Module("dlrover.trainer.tensorflow.hooks.global_step_hook", {
        "GlobalStepHook": "nothing: `dlrover.tensorflow.estimators` counts by itself",
    }, f"{_ORIGINAL}.tensorflow"),
    Module("dlrover.trainer.util.conf_util", {
        "ConfigurationManagerInterface": "a class of `dlrover.tensorflow.estimators`",
        "ConfigurationManagerMeta": "a class of `dlrover.tensorflow.estimators`",
    }, f"{_ORIGINAL}.tensorflow"),
    Module("dlrover.trainer.util.log_util", _LOGGER, f"{_ORIGINAL}.replaced"),
    Module("dlrover.python.common.log", _LOGGER, f"{_ORIGINAL}.replaced"),
    Module("dlrover.python.common.enums", {"FailoverStrategy": _RULES}, f"{_ORIGINAL}.replaced"),
    Module("dlrover.python.common.storage", _DELETION, f"{_ORIGINAL}.retention"),
    Module("dlrover.python.common.store", _DELETION, f"{_ORIGINAL}.retention"),
    Module(f"{_AGENT}.sharding.client", {
        "IndexShardingClient": "`dlrover.data.ElasticDataset`",
        "ShardingClient": "`dlrover.data.Records`",
    }, f"{_ORIGINAL}.sharding"),
    Module(f"{_AGENT}.sychronization.sync_client", {
        "SyncClient": "`torch.distributed.barrier`",
    }, f"{_ORIGINAL}.replaced"),
    Module(f"{_AGENT}.tensorflow.hooks", {
        "ElasticDataShardReportHook": "`dlrover.tensorflow.dataset`, which reports by itself",
        "ReportModelInfoHook": "`dlrover.tensorflow.resilient`, which counts by itself",
    }, f"{_ORIGINAL}.tensorflow"),
    Module(f"{_AGENT}.torch.dynamic_failover", {
        "AgentFailureInfo": _RULES,
        "DynamicAgentFailoverExtension": _RULES,
    }, f"{_ORIGINAL}.replaced"),
    Module("dlrover.python.training_event", {
        "DLRoverAgentEvent": "`dlrover events`",
        "DLRoverMasterEvent": "`dlrover events`",
        "TrainerProcess": "`dlrover.training.activity`",
        "WarningType": "`logging`",
    }, f"{_ORIGINAL}.events"),
    Module(f"{_UNIFIED}.api.builder", {
        **_BUILDER, "RLJobBuilder": "`dlrover.roles.Job`", "RLRoleType": "names of roles",
    }, f"{_ORIGINAL}.unified"),
    Module(f"{_UNIFIED}.api.builder.base", _BUILDER, f"{_ORIGINAL}.unified"),
    Module(f"{_UNIFIED}.api.builder.rl", {"RLJobBuilder": "`dlrover.roles.Job`"}, f"{_ORIGINAL}.unified"),
    Module(f"{_UNIFIED}.api.runtime", {**_RUNTIME, **_RAY_LOADER}, f"{_ORIGINAL}.runtime"),
    Module(f"{_UNIFIED}.api.runtime.ray_dataloader_iter", _RAY_LOADER, f"{_ORIGINAL}.runtime"),
    Module(f"{_UNIFIED}.api.runtime.worker", _WORKER, f"{_ORIGINAL}.runtime"),
    Module(f"{_UNIFIED}.common.enums", {"RLRoleType": "names of roles"}, f"{_ORIGINAL}.unified"),
    Module(f"{_UNIFIED}.controller.extension", {"ManagerExtension": _RULES}, f"{_ORIGINAL}.replaced"),
    Module(f"{_UNIFIED}.util.config_util", {
        "args_2_omega_conf": "`omegaconf.OmegaConf.create(vars(args))`",
        "omega_conf_2_args": "`argparse.Namespace(**conf)`",
    }, f"{_ORIGINAL}.unified"),
)  # fmt: skip

PROGRAMS = (
    MainModule("dlrover.trainer.torch.main", "`dlrover-run`", "dlrover.cli:launcher"),
    MainModule("dlrover.trainer.torch.elastic_run", "`dlrover-run`", "dlrover.cli:launcher"),
    MainModule("dlrover.trainer.torch.compatible_main", "`dlrover-run`", "dlrover.cli:launcher"),
    MainModule(
        "dlrover.trainer.torch.node_check.nvidia_gpu", "`dlrover check`",
        "dlrover.cli:command", f"{_ORIGINAL}.programs:node_check",
    ),
    MainModule(
        "dlrover.trainer.torch.node_check.ascend_npu", "`dlrover check`",
        "dlrover.cli:command", f"{_ORIGINAL}.programs:node_check",
    ),
    MainModule(
        "dlrover.python.master.main", "`dlrover master`",
        "dlrover.cli:command", f"{_ORIGINAL}.programs:master",
    ),
    MainModule(
        "dlrover.trainer.entry.local_entry", "`dlrover-run --chief -m dlrover.tensorflow.estimators`",
        "dlrover.cli:launcher", f"{_ORIGINAL}.programs:estimator",
    ),
    MainModule(
        "dlrover.trainer.__main__", "`dlrover-run --chief -m dlrover.tensorflow.estimators`",
        "dlrover.cli:launcher", f"{_ORIGINAL}.programs:estimator",
    ),
)  # fmt: skip

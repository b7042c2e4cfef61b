"""The original's names are where they were, with its parameters, and cost nobody else anything."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.errors import ConfigurationError
from dlrover.original import programs
from dlrover.original.names import MODULES, PROGRAMS

ROOT = Path(__file__).parents[2]
NAMES = [
    tuple(line.split()) for line in Path(__file__).with_name("names.txt").read_text().splitlines()
]
"""Modules and names that the original's examples and pages import, or its reference lists."""

FLASH = "dlrover.trainer.torch.flash_checkpoint"
SHARDING = "dataset_name batch_size num_epochs dataset_size shuffle task_type num_minibatches_per_shard storage_type"
PARAMETERS = {
    f"{FLASH}.ddp DdpCheckpointer": "checkpoint_dir local_shard_num global_shard_num comm_backend deletion_strategy"
    " save_timeout replica_count",
    f"{FLASH}.ddp DdpCheckpointer.save_checkpoint": "self step state_dict path storage_type",
    f"{FLASH}.ddp DdpCheckpointer.load_checkpoint": "self resume_path",
    f"{FLASH}.ddp DdpCheckpointer.wait_latest_checkpoint": "self timeout",
    f"{FLASH}.fsdp FsdpShardCheckpointer": "checkpoint_dir comm_backend deletion_strategy save_timeout",
    f"{FLASH}.fsdp FsdpFullCheckpointer.save_checkpoint": "self step model optimizer extra_sd path storage_type",
    f"{FLASH}.fsdp FsdpShardCheckpointer.load_checkpoint": "self model optimizer resume_path",
    "dlrover.trainer.torch.elastic.trainer ElasticTrainer": "model dataloader",
    "dlrover.trainer.torch.elastic.trainer ElasticTrainer.prepare": "self optimizer lr_scheduler",
    "dlrover.trainer.torch.elastic.trainer ElasticTrainer.step": "self fix_total_batch_size",
    "dlrover.trainer.torch.elastic.sampler ElasticDistributedSampler.state_dict": "self iter_step micro_batch_size",
    "dlrover.trainer.torch.elastic.dataloader ElasticDataLoader.update_batch_size": "self batch_size",
    "dlrover.python.elastic_agent.sharding.client ShardingClient": SHARDING,
    "dlrover.python.elastic_agent.sharding.client ShardingClient.report_batch_done": "self batch_size err_msg task_ids",
    "dlrover.trainer.tensorflow.reader.file_reader FileReader": "path num_epochs batch_size enable_dynamic_sharding"
    " skip_header",
}
"""By class or method: its parameters, in order."""


LIBRARIES = {"hf_trainer": "transformers", "deepspeed": "deepspeed"}


def resolve(module: str, name: str) -> object:
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.torch
@pytest.mark.parametrize(("module", "name"), NAMES)
def test_names_are_where_they_were(module: str, name: str) -> None:
    library = LIBRARIES.get(module.rpartition(".")[2], "torch")
    pytest.importorskip(library, reason=f"{module} needs {library}; scripts/test-engines has it")
    assert resolve(module, name) is not None


@pytest.mark.torch
@pytest.mark.parametrize("what", PARAMETERS)
def test_parameters_are_those_of_the_original(what: str) -> None:
    found = inspect.signature(resolve(*what.split()))  # type: ignore[arg-type]
    named = [
        p.name for p in found.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    assert " ".join(named) == PARAMETERS[what]


def test_the_table_has_every_name_and_the_files_are_made_from_it() -> None:
    table = {(module.name, name) for module in MODULES for name in module.names}
    assert set(NAMES) <= table
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "original-names"), "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_programs_can_be_found() -> None:
    for program in PROGRAMS:
        assert importlib.util.find_spec(program.name) is not None


def test_nothing_of_ours_imports_them() -> None:
    code = "import sys, dlrover.cli.main, dlrover.training, dlrover.agent; print([m for m in sys.modules if m.startswith(('dlrover.original', 'dlrover.trainer', 'dlrover.python', 'atorch', 'tfplus'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_master_of_the_original_is_one_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "--platform",
        "local",
        "--job_name",
        "digits",
        "--node_num",
        "2",
        "--port",
        "50001",
        "--hang_downtime",
        "5",
    ]
    made = programs.master(argv)
    assert made == ["master", "--name", "digits", "--port", "50001", "--nnodes", "2"]
    assert "without effect: --hang_downtime 5" in capsys.readouterr().err
    assert programs.master(["--job_name", "x"])[-2:] == ["--platform", "kubernetes"]
    with pytest.raises(
        ConfigurationError, match="--platform ray: must be one of local, pyk8s, k8s"
    ):
        programs.master(["--job_name", "x", "--platform", "ray"])


@pytest.mark.torch
def test_what_cannot_be_says_what_to_write() -> None:
    refused = {
        f"{FLASH}.megatron save_checkpoint": "FlashSave",
        f"{FLASH}.megatron_dist_ckpt load_checkpoint": "FlashLoad",
        "dlrover.python.elastic_agent.sychronization.sync_client SyncClient": "barrier",
        "dlrover.python.unified.api.runtime.worker current_worker": "dlrover.roles",
    }
    for what, instead in refused.items():
        call = resolve(*what.split())
        with pytest.raises(ConfigurationError, match=instead):
            call(1) if "megatron" in what else call()  # type: ignore[operator]


@pytest.mark.torch
def test_torch_keeps_its_own_functions() -> None:
    import torch

    before = torch.save, torch.load
    for module in (f"{FLASH}.ddp", f"{FLASH}.fsdp", f"{FLASH}.megatron"):
        importlib.import_module(module)
    assert (torch.save, torch.load) == before


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("dlrover.trainer.torch.flash_checkpoint.fsdpp", "Did you mean dlrover.trainer.torch.flash_checkpoint.fsdp?"),
        ("dlrover.python.common.constants", "docs/from-dlrover.md"),
        ("tfplus.kv_variable.python.ops.kv_variable_ops", "'tfplus.kv_variable': use dlrover.embedding"),
        ("atorch.trainer.atorch_trainer", "use the Trainer of Transformers with"),
        ("atorch.nowhere", "docs/from-dlrover.md"),
    ],
)  # fmt: skip
def test_a_module_that_is_not_here_says_what_to_write(module: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "packages" / "original" / "src")},
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: No module named")
    assert words in last


def test_the_logger_shows_what_it_showed(capfd: pytest.CaptureFixture[str]) -> None:
    code = "from dlrover.python.common.log import default_logger as it; it.info('step %d', 3); it.debug('no')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert capfd.readouterr().err.endswith("[INFO] [<string>:1:<module>] step 3\n")

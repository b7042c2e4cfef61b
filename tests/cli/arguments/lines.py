"""Command lines of ``dlrover-run``, and how tests read them."""

from __future__ import annotations

import os

import pytest

from dlrover.cli.run.arguments import parse
from dlrover.errors import ConfigurationError, ExitCode

TORCHRUN_DESTS = [
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "standalone",
    "max_restarts",
    "monitor_interval",
    "start_method",
    "event_log_handler",
    "role",
    "module",
    "no_python",
    "run_path",
    "log_dir",
    "redirects",
    "tee",
    "local_ranks_filter",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "node_rank",
    "master_addr",
    "master_port",
    "local_addr",
    "logs_specs",
    "numa_binding",
    "signals_to_handle",
    "shutdown_timeout",
    "virtual_local_rank",
    "training_script",
    "training_script_args",
]

OWN_DESTS = [
    "network_check",
    "node_unit",
    "auto_config",
    "auto_tunning",
    "exclude_straggler",
    "save_at_breakpoint",
    "survive",
    "accelerator",
    "precheck",
    "job_dir",
    "dashboard",
    "platform",
    "ray_address",
    "ray_resources",
    "ray_working_dir",
    "ray_env",
    "local_nodes",
    "servers",
    "server_failover",
    "instances",
    "spares",
    "lifeline_fd",
    "server_module",
    "embedding_servers",
    "chief",
    "evaluators",
    "node_memory",
    "node_cpu",
    "auto_scale",
    "config",
    "output",
    "comm_perf_test",
    "numa_affinity",
    "membind_policy",
    "training_port",
    "ucp_device_type",
]

COMMAND_LINES = [
    "train.py",
    "--standalone train.py",
    "--standalone --nproc-per-node=gpu train.py --lr 0.1",
    "--standalone --nproc_per_node auto train.py",
    "--nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr h0 --master-port 29501 train.py",
    "--nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=h0 --master_port=29501 train.py",
    "--nnodes 1:4 --max-restarts 3 --rdzv-id job --rdzv-backend c10d --rdzv-endpoint h0 train.py",
    "--nnodes=1:4 --max_restarts=3 --rdzv_id=job --rdzv_backend=c10d --rdzv_endpoint=h0:1 train.py",
    "--rdzv-conf join_timeout=600,last_call_timeout=5 train.py",
    "-m pkg.train --epochs 3",
    "--module pkg.train -m",
    "--no-python bash -c true",
    "--no_python ./run.sh --nnodes 3",
    "--run-path /abs/train.py --run-path",
    "-r 3 -t 1 --log-dir logs train.py",
    "-r3 -t0:1,1:2 train.py",
    "--redirects 0:3,1:0 --tee=3 --log_dir=logs train.py",
    "--local-ranks-filter 0,1 --duplicate-stdout-filters a,b,,c train.py",
    "--duplicate_stderr_filters x --local_ranks_filter=2 train.py",
    "--monitor-interval 5 --start-method forkserver --event-log-handler console train.py",
    "--role trainer --numa-binding node --virtual-local-rank --logs-specs default train.py",
    "--signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 5 --local-addr 10.0.0.1 train.py",
    "--nnodes 2 --nnodes 3 train.py",
    "train.py --nnodes 9 -m --unknown -- x",
    "--nnodes 2 -- train.py -- x",
    "--nn 1 --nproc_p 4 --stand --max-r 1 train.py",
    "train.py -",
]

PATH_ONLY = {"PATH": os.environ.get("PATH", os.defpath)}


def no_probe(word):
    raise AssertionError(f"asked for {word}")


def options(*argv, probe=no_probe, **environ):
    """The meaning of a command line that runs ``train.py``."""
    return parse([*argv, "train.py"], {**PATH_ONLY, **environ}, probe)


def refusal(*argv, probe=no_probe, **environ):
    """The one sentence that refuses a whole command line."""
    with pytest.raises(ConfigurationError) as caught:
        parse(argv, {**PATH_ONLY, **environ}, probe)
    message = str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE
    assert "\n" not in message
    assert message.endswith((".", "; see dlrover-run --help"))
    return message


def outcome(function, *args):
    """What a function returns, or None where it refuses."""
    try:
        return function(*args)
    except (ValueError, ConfigurationError):
        return None


def actions(parser):
    return {action.dest: action for action in parser._actions}

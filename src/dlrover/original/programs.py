"""Command lines of the original's programs, as ours."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence

from dlrover.errors import ConfigurationError, DLRoverError

PLATFORMS = {
    "local": [],
    "pyk8s": ["--platform", "kubernetes"],
    "k8s": ["--platform", "kubernetes"],
}
"""By the original's ``--platform``: options of ``dlrover master``."""
ESTIMATOR = (
    "TensorFlow has had no tf.estimator since 2.16, so there is nothing to run a train_conf class with; install"
    " tensorflow==2.15.*, or write the model in Keras or as a loop in dlrover.tensorflow.resilient, and start it with"
    " dlrover-run --chief --servers N; see docs/tensorflow.md."
)
ESTIMATOR_PLATFORMS = {
    "local": True, "local_kubernetes": True, "local_ray": True, "Kubernetes": False, "kubernetes": False
}  # fmt: skip
"""By the original's ``--platform``: whether the nodes are started on this machine."""


def master(argv: Sequence[str]) -> list[str]:
    """Return the command line of ``dlrover master`` for one of ``dlrover.python.master.main``.

    Its other options have no effect: what they set, settings do (docs/settings.md), or nothing needs to be set.

    Raises:
        ConfigurationError: the platform is another one.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dlrover.python.master.main", allow_abbrev=False
    )
    parser.add_argument("--job_name", required=True)
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--platform", default="pyk8s")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--node_num", type=int, default=1)
    known, ignored = parser.parse_known_args(argv)
    if known.platform not in PLATFORMS:
        raise ConfigurationError(
            f"--platform {known.platform}: must be one of {', '.join(PLATFORMS)}."
        )
    if ignored:
        print(
            f"dlrover: without effect: {' '.join(ignored)}; see docs/settings.md", file=sys.stderr
        )
    return [
        "master", "--name", known.job_name, "--port", str(known.port), "--nnodes", str(known.node_num),
        *PLATFORMS[known.platform],
    ]  # fmt: skip


def node_check(_: Sequence[str]) -> list[str]:
    """Return the command line of ``dlrover check``."""
    return ["check"]


def run(command: Callable[[], int], arguments: Callable[[Sequence[str]], list[str]]) -> int:
    """Run one of our commands with the arguments of one of the original's; return its exit code."""
    try:
        sys.argv[1:] = arguments(sys.argv[1:])
    except DLRoverError as error:
        print(f"dlrover: {error}", file=sys.stderr)
        return error.exit_code
    return command()


def estimator(argv: Sequence[str]) -> list[str]:
    """Return the command line of ``dlrover-run`` for one of ``dlrover.trainer.entry.local_entry``.

    Raises:
        ConfigurationError: there are no estimators, or an option is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dlrover.trainer.entry.local_entry", allow_abbrev=False
    )
    parser.add_argument("--conf", required=True)
    parser.add_argument("--platform", default="local")
    for role, count in (("ps", 1), ("worker", 1), ("evaluator", 0)):
        parser.add_argument(f"--{role}_num", type=int, default=count)
    known, ignored = parser.parse_known_args(argv)
    if importlib.util.find_spec("tensorflow_estimator") is None:  # a package that 2.15 needs
        raise ConfigurationError(ESTIMATOR)
    if known.platform not in ESTIMATOR_PLATFORMS:
        raise ConfigurationError(
            f"--platform {known.platform}: must be one of {', '.join(ESTIMATOR_PLATFORMS)}."
        )
    if ignored:
        print(f"dlrover: without effect: {' '.join(ignored)}", file=sys.stderr)
    nodes = [
        "--local-nodes", str(known.worker_num), "--servers", str(known.ps_num),
        "--evaluators", str(known.evaluator_num),
    ]  # fmt: skip
    here = ESTIMATOR_PLATFORMS[known.platform]
    return ["--chief", *(nodes if here else ()), "-m", "dlrover.tensorflow.estimators", known.conf]

"""``dlrover-run --chief ... -m dlrover.tensorflow.estimators module.Class`` runs the estimator of a configuration."""

from __future__ import annotations

import argparse
import functools

from dlrover.tensorflow.estimators.conf import load
from dlrover.tensorflow.estimators.executor import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dlrover.tensorflow.estimators")
    parser.add_argument("conf", metavar="MODULE.CLASS", help="The configuration.")
    run(functools.partial(load, parser.parse_args().conf))

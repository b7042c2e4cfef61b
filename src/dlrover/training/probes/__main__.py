"""Run a check process: it probes a node's devices, memory, disk and network, and ends with its parent."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
from pathlib import Path

import msgspec

from dlrover import accelerators, config
from dlrover._util import decoding, framing
from dlrover.training.probes.runner import Runner
from dlrover.training.probes.wire import ProbeProblem, Reply, Request, ShareValue

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Carry out requests until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m dlrover.training.probes", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="Where to check the disk.")
    parser.add_argument("--accelerator", default="", help="As of dlrover-run.")
    parser.add_argument("--device", type=int, default=-1, help="The one device to check.")
    parser.add_argument("--meet", action="store_true", help="Use the store of a launcher's job.")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Libraries may print to standard output; only replies may reach the pipe.
    requests, replies = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(reply: Reply) -> None:
        replies.write(framing.pack(msgspec.msgpack.encode(reply)))

    vendor = accelerators.present(args.accelerator)
    environ = config.environ()
    runner = Runner(vendor, args.directory, environ, say, index=args.device, meet=args.meet)
    decoder: msgspec.msgpack.Decoder[Request] = decoding.msgpack_decoder(Request)
    while True:
        try:
            request = decoder.decode(framing.receive(requests.readinto))
        except ConnectionError:
            return
        if not isinstance(request, ShareValue):
            runner.probe(request)
            continue
        try:
            runner.share(request)
        except (ImportError, RuntimeError, OSError, ValueError) as error:
            say(ProbeProblem(str(error).partition("\n")[0]))


if __name__ == "__main__":
    main()

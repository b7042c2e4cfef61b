"""Writes what a worker can know of how it was started, as JSON: ``facts.py OUT [anything ...]``."""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

LIMITS = ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "RSS", "STACK")


def status_field(name: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{name}:"))


def descriptors() -> dict[int, str]:
    """The open descriptors above standard error, but for the one that lists them."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return {number: name for number, name in found.items() if number > 2}


main = sys.modules["__main__"]
facts = {
    "environ": dict(os.environ),
    "argv": sys.argv,
    "cwd": os.getcwd(),
    "path": sys.path,
    "flags": str(sys.flags),
    "warnoptions": sys.warnoptions,
    "executable": sys.executable,
    "name": __name__,
    "file": __file__,
    "is_main": main.__dict__ is globals(),
    "package": __package__,
    "spec": getattr(__spec__, "name", None),
    "loader": type(__loader__).__name__,
    "globals": sorted(name for name in globals() if name.startswith("__")),
    "code_file": status_field.__code__.co_filename,
    "stdin": os.readlink("/proc/self/fd/0"),
    "descriptors": descriptors(),
    "handlers": {s.name: str(signal.getsignal(s)) for s in signal.Signals},
    "blocked": status_field("SigBlk"),
    "ignored": status_field("SigIgn"),
    "umask": status_field("Umask"),
    "nice": os.nice(0),
    "cpus": sorted(os.sched_getaffinity(0)),
    "limits": {n: resource.getrlimit(getattr(resource, f"RLIMIT_{n}")) for n in LIMITS},
    "leads_session": os.getsid(0) == os.getpid() == os.getpgid(0),
    "threads": [thread.name for thread in threading.enumerate()],
    "unbuffered": sys.stdout.write_through,
    "encodings": [sys.stdout.encoding, sys.stderr.encoding, sys.stderr.errors],
    "modules": sorted(name for name in sys.modules if name.partition(".")[0] != "encodings"),
    "meta_path": len(sys.meta_path),
    "recursion": sys.getrecursionlimit(),
    "excepthook": sys.excepthook is sys.__excepthook__,
}

if __name__ == "__main__":
    # By process: the rank may be what is wrong.
    Path(sys.argv[1], f"{os.getpid()}.json").write_text(json.dumps(facts, default=str))

"""A lost TensorFlow parameter server: from its SIGKILL to the next step, beside TensorFlow as it is.

A table of 1 M x 16 floats is split over two parameter servers; a chief schedules steps on one worker, one at a time,
and saves every second. A server is killed again and again, always between two steps' reports.

- *guard*: two servers, ``dlrover.tensorflow.resilient`` under ``dlrover-run --chief``; the killed one starts again.
- *guard, spare*: three servers, one of them idle.
- *TensorFlow*: the same program and servers without the guard, as its documentation shows; and then all of it started
  again by hand at once, from the checkpoint: the least that a user without the guard waits for.

Run it with TensorFlow 2.16 or later in the environment. The first kill counts, too: the agents have no zygote yet that has
imported TensorFlow, if this is the program's first run.

    python benchmarks/tensorflow_ps.py --kills 5 --json benchmarks/results/tensorflow_ps.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROWS, DIM, BATCH = 1_000_000, 16, 1024
EVERY = 1.0
"""Seconds between two checkpoints."""
PAUSE = 4.0
"""Seconds of training before each kill."""
LIMIT = 180.0
"""Seconds that anything may take."""


# ---- the program


def train(cluster, out: Path) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Train until a file says stop; note the time of each step."""
    import tensorflow as tf  # noqa: PLC0415

    parts = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = cluster.strategy(variable_partitioner=parts)
    with strategy.scope():
        table = tf.Variable(tf.random.uniform([ROWS, DIM]), name="table")
        weight = tf.Variable(0.0, name="weight")

    @tf.function
    def step() -> None:
        ids = tf.random.uniform([BATCH], 0, ROWS, tf.int64)
        rows = tf.nn.embedding_lookup(table, ids)
        weight.assign_add(0.01 * (tf.reduce_mean(rows) - weight))

    progress = cluster.resume(strategy, table=table, weight=weight)
    with (out / "steps").open("a") as notes:
        print(
            json.dumps({"begin": time.time(), "step": progress.step, **cluster.spec}),
            file=notes,
            flush=True,
        )
        while not (out / "stop").exists():
            progress.schedule(step)
            progress.coordinator.join()
            print(json.dumps({"time": time.time(), "step": progress.step}), file=notes, flush=True)


def guarded(out: Path, spares: int) -> None:
    """The program with the guard."""
    from dlrover.tensorflow import resilient  # noqa: PLC0415

    resilient(checkpoint=out / "ckpt", every_seconds=EVERY, spares=spares)(train)(out=out)


def plain(out: Path) -> None:
    """The program with TensorFlow alone: ``TF_CONFIG`` names the task."""
    import tensorflow as tf  # noqa: PLC0415

    from dlrover.tensorflow.cluster import Present  # noqa: PLC0415 - the same steps and checkpoints
    from dlrover.tensorflow.machine.options import GuardOptions  # noqa: PLC0415

    config = json.loads(os.environ["TF_CONFIG"])
    spec, role = config["cluster"], config["task"]["type"]
    if role != "chief":
        cluster = tf.train.ClusterSpec(spec)
        index = config["task"]["index"]
        tf.distribute.Server(cluster, job_name=role, task_index=index, protocol="grpc").join()
    train(Present("chief", spec, GuardOptions(str(out / "ckpt"), EVERY, 0, 3, 0, LIMIT, 1)), out)


# ---- the measurement


def notes(out: Path) -> list[dict]:
    """All notes of the program so far."""
    path = out / "steps"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def wait(condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Wait for a condition."""
    until = time.monotonic() + limit
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {limit:g} s")
        time.sleep(0.02)


def steps_after(out: Path, moment: float) -> list[dict]:
    """Notes of steps after a moment."""
    return [note for note in notes(out) if note.get("time", 0.0) > moment]


def listener(address: str) -> int:
    """The pid of the process that listens at an address of this machine."""
    port = address.rpartition(":")[2]
    shown = subprocess.run(
        ["ss", "-ltnpH", f"sport = :{port}"], capture_output=True, text=True, check=True
    ).stdout
    return int(shown.partition("pid=")[2].partition(",")[0])


def kill_server(out: Path) -> float:
    """Kill the last parameter server of the present cluster; return when."""
    spec = [note for note in notes(out) if "begin" in note][-1]
    pid = listener(spec["ps"][-1])
    os.kill(pid, signal.SIGKILL)
    return time.time()


def cost_of_kill(out: Path) -> dict:
    """Kill a server; return the seconds to the next step and to the next new one, and the steps repeated."""
    killed = kill_server(out)
    last = [note for note in notes(out) if "time" in note][-1]["step"]

    def again() -> list[dict]:
        """The notes from the last beginning after the kill."""
        found = notes(out)
        begins = [place for place, note in enumerate(found) if note.get("begin", 0.0) > killed]
        return found[begins[-1] :] if begins else []

    def new_step() -> list[dict]:
        return [note for note in again() if "time" in note and note["step"] > last]

    wait(new_step, "a new step after the kill")
    begin, step, *_ = again()
    return {
        "next_step": step["time"] - killed,
        "new_step": new_step()[0]["time"] - killed,
        "repeated": last - begin["step"],
        "load": os.getloadavg()[0],
    }


def survive(folder: Path, kills: int, spares: int) -> list[dict]:
    """Kill servers of one job with the guard; return what each kill cost."""
    out = folder / f"guard-{spares}"
    out.mkdir()
    command = [
        sys.executable,
        "-m",
        "dlrover.cli.run.run",
        "--job-dir",
        str(out / "job"),
        "--chief",
    ]
    command += ["--local-nodes=1", f"--servers={2 + spares}", "--shutdown-timeout=5", __file__]
    environ = {**os.environ, "DLROVER_STATE_DIR": str(out), "DLROVER_CACHE_DIR": str(out / "cache")}
    costs = []
    with (out / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--role", "guarded", "--out", str(out), "--spares", str(spares)],
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait(lambda: steps_after(out, 0.0) or process.poll() is not None, "the first step")
            for _ in range(kills):
                time.sleep(PAUSE)
                costs.append(cost_of_kill(out))
                print(f"  spares {spares}: {costs[-1]}", flush=True)
            (out / "stop").touch()
            code = process.wait(LIMIT)
        finally:
            process.terminate()  # has no effect after its end
            process.wait(LIMIT)

    if code:
        raise SystemExit((out / "log").read_text()[-5000:])
    return costs


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_it_is(folder: Path) -> dict:
    """Kill a server of TensorFlow without the guard, and start everything again once the chief has died."""
    out = folder / "plain"
    out.mkdir()

    def start() -> list[subprocess.Popen]:
        roles = {"chief": 1, "worker": 1, "ps": 2}
        spec = {role: [f"127.0.0.1:{free_port()}" for _ in range(n)] for role, n in roles.items()}
        started = []
        for role, count in roles.items():
            for index in range(count):
                config = json.dumps({"cluster": spec, "task": {"type": role, "index": index}})
                with (out / f"{role}-{index}.log").open("ab") as log:
                    started.append(
                        subprocess.Popen(
                            [sys.executable, __file__, "--role", "plain", "--out", str(out)],
                            env={**os.environ, "TF_CONFIG": config},
                            stdout=log,
                            stderr=log,
                        )
                    )
        return started

    def end(started: list[subprocess.Popen]) -> None:
        for process in started:
            process.kill()
            process.wait()

    tasks = start()
    wait(lambda: steps_after(out, 0.0), "the first step without the guard")
    time.sleep(PAUSE)
    killed = kill_server(out)
    wait(lambda: tasks[0].poll() is not None, "the chief's end")
    died, code = time.time() - killed, tasks[0].returncode
    end(tasks)
    tasks = start()
    again = time.time()
    wait(lambda: steps_after(out, again), "a step after the restart by hand")
    first = steps_after(out, again)[0]["time"]
    (out / "stop").touch()
    wait(lambda: tasks[0].poll() is not None, "the end without the guard")
    end(tasks)
    return {
        "chief_exit_code": code,
        "chief_died_after": died,
        "next_step_if_started_again_at_once": first - killed,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measure and print; write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--role", choices=["guarded", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--spares", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "guarded":
        guarded(args.out, args.spares)
        return
    if args.role == "plain":
        plain(args.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        figures: dict = {"guard": survive(Path(folder), args.kills, 0)}
        figures["guard, spare"] = survive(Path(folder), args.kills, 1)
        figures["TensorFlow"] = as_it_is(Path(folder))
    by_hand = figures["TensorFlow"]["next_step_if_started_again_at_once"]
    for name in ("guard", "guard, spare"):
        times = [cost["next_step"] for cost in figures[name]]
        middle = statistics.median(times)
        print(
            f"{name}: kill to next step {middle:.2f} s (median of {len(times)}; {min(times):.2f} to {max(times):.2f}), "
            f"{by_hand / middle:.1f} times quicker than everything started again at once"
        )
    print(f"TensorFlow: {figures['TensorFlow']}")
    if args.json:
        machine = {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "kernel": platform.release(),
        }
        args.json.write_text(json.dumps({"machine": machine, "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""A program as TensorFlow's guide writes it, with its own checkpoints, that knows nothing of DLRover but the guard.

``own.py OUT STEPS``; its files are those of counted.py.
"""

import json
import sys
import time
from pathlib import Path

import tensorflow as tf

from dlrover.tensorflow import resilient

OUT, STEPS = Path(sys.argv[1]), int(sys.argv[2])


@resilient
def main() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
        )
        server.join()
    parts = tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=64, max_shards=3
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=parts)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = tf.Variable(tf.zeros([300, 4]), name="table")
        done = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(table=table, done=done)
    manager = tf.train.CheckpointManager(checkpoint, str(OUT / "own"), max_to_keep=2)
    checkpoint.restore(manager.latest_checkpoint)

    @tf.function
    def step():
        rows = tf.nn.embedding_lookup(table, tf.range(10))
        done.assign_add(1)
        return tf.reduce_sum(rows)

    note("begin", int(done.numpy()), resolver.cluster_spec().as_dict())
    while done.numpy() < STEPS:
        coordinator.schedule(step)
        coordinator.join()
        reached = int(done.numpy())
        note("step", reached)
        if reached % 20 == 0:
            manager.save()
        time.sleep(0 if (OUT / "hurry").exists() else 0.05)
    (OUT / "end").write_text(json.dumps({"steps": int(done.numpy())}))


def note(*what) -> None:
    with (OUT / "notes").open("a") as file:
        print(json.dumps([time.time(), *what]), file=file)


main()

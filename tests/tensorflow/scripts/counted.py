"""Counts each sample on the parameter servers; ``counted.py OUT SAMPLES EPOCHS [SPARES]``.

Its output is OUT/notes and OUT/end; OUT/hurry ends its pauses.
"""

import json
import sys
import time
from pathlib import Path

import tensorflow as tf

from dlrover.data import Records
from dlrover.tensorflow import dataset, resilient

OUT, SAMPLES, EPOCHS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
SPARES = int(sys.argv[4]) if len(sys.argv) > 4 else 0


@resilient(checkpoint=OUT / "ckpt", every_seconds=0.5, spares=SPARES)
def train(cluster) -> None:
    parts = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = cluster.strategy(variable_partitioner=parts)
    with strategy.scope():
        seen = tf.Variable(tf.zeros([SAMPLES, 1]), name="seen")
    records = Records(range(SAMPLES), epochs=EPOCHS, shuffle=True, shard=50)

    @tf.function
    def step(batch):
        for part, ids in zip(seen.variables, of_parts(seen, batch), strict=True):
            part.scatter_add(tf.IndexedSlices(tf.ones([tf.size(ids), 1]), ids))

    progress = cluster.resume(strategy, records=records, seen=seen)
    note("begin", progress.step, cluster.spec)
    for _ in records.until_end():
        for batch in dataset(records, tf.TensorSpec([], tf.int64), batch_size=10):
            progress.schedule(step, args=(batch,))
            progress.coordinator.join()
            note("step", progress.step)
            time.sleep(0 if (OUT / "hurry").exists() else 0.05)
    progress.save()
    counts = tf.concat([part.read_value() for part in seen.variables], 0).numpy().ravel()
    wrong = {int(i): int(c) for i, c in enumerate(counts) if c != EPOCHS}
    (OUT / "end").write_text(json.dumps({"steps": progress.step, "wrong": wrong}))


def of_parts(seen, ids):
    """The rows of each part of a variable, from its start."""
    start = 0
    for part in seen.variables:
        size = part.shape[0]
        inside = tf.boolean_mask(ids, (ids >= start) & (ids < start + size))
        yield inside - start
        start += size


def note(*what) -> None:
    with (OUT / "notes").open("a") as file:
        print(json.dumps([time.time(), *what]), file=file)


train()

"""Trains the same model with any backend of Keras, and checks rows against gradients that are known."""

import os
import sys
from pathlib import Path

import numpy as np

if os.environ["KERAS_BACKEND"] == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)

import keras

from dlrover.embedding import HashTable, Initializer
from dlrover.errors import ConfigurationError
from dlrover.integrations.keras import HashEmbedding

KEYS = np.array([[1, 2], [2**40, 2]], np.int64)

table = HashTable(3, optimizer="sgd", learning_rate=1.0, initializer=Initializer("constant", 2.0))
inputs = keras.Input((2,), dtype="int64")
rows = HashEmbedding(table)(inputs)
assert rows.shape == (None, 2, 3), rows.shape
model = keras.Model(inputs, keras.ops.sum(rows, axis=(1, 2), keepdims=False))
model.compile(optimizer="sgd", loss=lambda wanted, given: keras.ops.sum(given - wanted))

assert (model.predict(KEYS, verbose=0) == 0).all()
assert len(table) == 0, "rows are made in training only"
model.fit(KEYS, np.zeros(2, np.float32), batch_size=2, verbose=0)
assert sorted(table.keys()) == [1, 2, 2**40]
# the loss is the sum, so that each use of a key has the gradient 1, divided by the batch's size of 1
expected = {1: 1.0, 2: 0.0, 2**40: 1.0}
for key, value in expected.items():
    assert np.allclose(table.peek(np.array([key])), value), (key, table.peek(np.array([key])))
assert np.allclose(model.predict(KEYS, verbose=0), [3.0, 3.0])
assert [
    float(weight.numpy() if hasattr(weight, "numpy") else weight.value) for weight in model.weights
] == [0.0]


def refused(function, *words: str) -> None:
    try:
        function()
    except ConfigurationError as error:
        if all(word in str(error) for word in words):
            return
        raise
    raise AssertionError(words)


refused(lambda: model.save(Path(os.environ["KERAS_HOME"]) / "model.keras"), "save_weights")
keras.config.set_dtype_policy("mixed_float16")
refused(lambda: HashEmbedding(table), "mixed_float16", "mixed_bfloat16")
keras.config.set_dtype_policy("mixed_bfloat16")
half = keras.Model(inputs, HashEmbedding(table)(inputs))
half.compile(optimizer="sgd", loss=lambda wanted, given: keras.ops.sum(given))
half.fit(KEYS, np.zeros((2, 2, 3), np.float32), batch_size=2, verbose=0)
assert np.allclose(table.peek(np.array([1])), 0.0), table.peek(np.array([1]))
keras.config.set_dtype_policy("float32")

frozen = HashEmbedding(table)
hidden = keras.layers.Flatten()(frozen(inputs))
model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
frozen.trainable = False
model.compile(optimizer="sgd", loss="mse")
count, before = len(table), table.peek(KEYS.reshape(-1))
model.fit(np.concatenate([KEYS, KEYS + 7]), np.ones(4, np.float32), batch_size=2, verbose=0)
assert len(table) == count, "a frozen layer makes no rows"
assert np.array_equal(table.peek(KEYS.reshape(-1)), before), "a frozen layer does not learn"

steps = table.step
twice = HashEmbedding(table)
model = keras.Model(inputs, keras.ops.sum(twice(inputs) + twice(inputs), axis=(1, 2)))
model.compile(optimizer="sgd", loss=lambda wanted, given: keras.ops.sum(given - wanted))
model.fit(KEYS, np.zeros(2, np.float32), batch_size=2, verbose=0)
assert table.step - steps == (1 if keras.backend.backend() == "torch" else 2)

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    refused(lambda: model.export(Path(os.environ["KERAS_HOME"]) / "exported"), "SavedModel")
    assert not twice.supports_jit, "a model with the layer is not compiled by XLA, even with a GPU"
    before = table.peek(np.array([2**40]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(KEYS, training=False))
    tape.gradient(loss, model.trainable_variables)
    assert np.array_equal(table.peek(np.array([2**40])), before), "rows learn in training only"

learned = HashTable(8, optimizer="adagrad", learning_rate=0.2, memory_bytes=8 << 20)
random = np.random.default_rng(0)
users = random.integers(0, 2**60, 40)
taste = random.choice([-1.0, 1.0], 40)
place = random.integers(0, 40, 2000)
inputs = keras.Input((1,), dtype="int64")
hidden = keras.layers.Flatten()(HashEmbedding(learned)(inputs))
model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
model.fit(users[place][:, None], taste[place], batch_size=100, epochs=5, verbose=0)
error = np.mean((model.predict(users[:, None], verbose=0)[:, 0] - taste) ** 2)
assert error < 0.05, error
sys.stdout.write(f"keras {keras.backend.backend()} learned\n")

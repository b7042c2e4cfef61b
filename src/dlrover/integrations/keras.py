"""Embeddings that grow for Keras 3, with TensorFlow, JAX or PyTorch as its backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from dlrover.embedding.table import HashTable
from dlrover.errors import ConfigurationError

__all__ = ["HashEmbedding"]


class HashEmbedding(keras.layers.Layer):
    """Embedding of any int64 keys; a key's row is made when it is first looked up in training.

    The table's own optimizer updates the rows in the backward pass, so they are no weights of the model. The layer's
    one weight, a zero, is what gradients are asked for. Outside of training, and where ``trainable`` is False, no row is
    made or updated, and keys without a row read zeros.

    Args:
        table: A `HashTable`, or a table on servers.
        options: Of any layer.

    Raises:
        ConfigurationError: The policy is ``mixed_float16``, with which Keras scales losses.
    """

    def __init__(self, table: HashTable, **options: Any) -> None:
        super().__init__(**options)
        if "mixed_float16" in (self.dtype_policy.name, keras.config.dtype_policy().name):
            raise ConfigurationError(
                "The dtype policy is mixed_float16, with which Keras scales losses, and so the gradients that the table"
                " gets; mixed_bfloat16 or float32 is accepted."
            )
        self.supports_jit = keras.backend.backend() != "tensorflow"  # XLA cannot call into Python
        self.table = table
        self.anchor = self.add_weight(shape=(), initializer="zeros", name="anchor")
        self._rows = _backend(keras.backend.backend())

    def call(self, keys: Any, training: bool = False) -> Any:
        """Return rows of keys: ``(*keys.shape, dim)``.

        Raises:
            ConfigurationError: The keys are no int64.
        """
        if keras.backend.standardize_dtype(keys.dtype) != "int64":
            raise ConfigurationError(
                f"keys have type {keys.dtype}; int64 is accepted, as of keras.Input(shape, dtype='int64')."
            )
        anchor = keras.ops.convert_to_tensor(self.anchor)
        learning = (
            training and self.trainable
        )  # TensorFlow asks for gradients of what is frozen, too
        read, learns = (self._read, self.table) if learning else (self._peek, None)
        rows = self._rows(read, learns, keys, anchor, self.table.dim)
        return keras.ops.cast(rows, self.compute_dtype)

    def compute_output_spec(self, keys: Any, training: bool = False) -> Any:
        """Return the shape and type of the rows."""
        return keras.KerasTensor((*keys.shape, self.table.dim), self.compute_dtype)

    def _read(self, keys: Any) -> Any:
        return self._found(self.table.lookup, keys)

    def _peek(self, keys: Any) -> Any:
        return self._found(self.table.peek, keys)

    def _found(self, read: Callable[[Any], Any], keys: Any) -> Any:
        keys = np.asarray(keys)
        return read(keys.reshape(-1)).reshape(*keys.shape, self.table.dim)

    def get_config(self) -> dict[str, Any]:
        """Refuse to be saved with a model, which would lack the rows.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"{self.name} is a HashEmbedding, whose table is no part of a model's file: save the model with save_weights,"
            " and the table with its own save."
        )

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> Any:
        """Refuse to be exported by TensorFlow, whose file would call into this process.

        Raises:
            ConfigurationError: ``save_type`` is ``savedmodel``.
        """
        if save_type == "savedmodel":
            raise ConfigurationError(
                f"{self.name} is a HashEmbedding, which a SavedModel cannot hold: export its rows with dlrover embedding."
            )
        return super()._trackable_children(save_type, **options)


def _update(table: HashTable | None, keys: Any, gradients: Any) -> Any:
    """Apply gradients to a table, if there is one that learns; return the gradient of the anchor."""
    if table is not None:
        given = np.asarray(gradients, np.float32).reshape(-1, table.dim)
        table.update(np.asarray(keys).reshape(-1), given)
    return np.float32(0)


def _backend(name: str) -> Callable[..., Any]:
    """Return a function that calls into Python for rows, and again for their gradients."""
    made = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}.get(name)
    if made is None:
        raise ConfigurationError(
            f"KERAS_BACKEND is {name!r}; tensorflow, jax or torch is accepted."
        )
    return made()


def _tensorflow() -> Callable[..., Any]:
    import tensorflow as tf  # noqa: PLC0415 - the backend that is chosen

    def rows(read: Any, learns: Any, keys: Any, anchor: Any, dim: int) -> Any:
        update = functools.partial(_update, learns)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def found(given: Any, weight: Any) -> Any:
            values = tf.numpy_function(read, [given], tf.float32)
            values.set_shape((*given.shape, dim))

            def gradient(upstream: Any) -> Any:
                done = tf.numpy_function(update, [given, upstream], tf.float32)
                done.set_shape(())
                return None, tf.cast(done, weight.dtype)

            return values, gradient

        return found(keys, anchor)

    return rows


def _jax() -> Callable[..., Any]:
    import jax  # noqa: PLC0415 - the backend that is chosen
    from jax.experimental import io_callback  # noqa: PLC0415

    if not jax.config.jax_enable_x64:
        raise ConfigurationError(
            "jax_enable_x64 is False, which cuts keys to 32 bits; True is accepted:"
            ' jax.config.update("jax_enable_x64", True).'
        )

    def rows(read: Any, learns: Any, keys: Any, anchor: Any, dim: int) -> Any:
        update = functools.partial(_update, learns)
        shape = jax.ShapeDtypeStruct((*keys.shape, dim), np.float32)

        @jax.custom_vjp  # type: ignore[untyped-decorator]
        def found(given: Any, weight: Any) -> Any:
            return io_callback(read, shape, given)

        def forward(given: Any, weight: Any) -> Any:
            return found(given, weight), (given, weight)

        def backward(kept: Any, upstream: Any) -> Any:
            given, weight = kept
            one = jax.ShapeDtypeStruct((), np.float32)
            done = io_callback(update, one, given, upstream)
            return np.zeros(given.shape, jax.dtypes.float0), done.astype(weight.dtype)

        found.defvjp(forward, backward)
        return found(keys, anchor)

    return rows


def _torch() -> Callable[..., Any]:
    import torch  # noqa: PLC0415 - the backend that is chosen

    from dlrover.embedding.gradients import of_this_pass  # noqa: PLC0415 - it imports torch

    class Found(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keys: Any, anchor: Any, read: Any, learns: Any) -> Any:
            ctx.given, ctx.weight, ctx.learns = keys, anchor, learns
            return torch.from_numpy(read(keys.detach().cpu().numpy())).to(keys.device)

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            if ctx.learns is not None:
                given = upstream[0].reshape(-1, ctx.learns.dim)
                of_this_pass().add(ctx.learns, ctx.given.reshape(-1), given, 1.0)
            return None, torch.zeros_like(ctx.weight), None, None

    def rows(read: Any, learns: Any, keys: Any, anchor: Any, dim: int) -> Any:
        return Found.apply(keys, anchor, read, learns)

    return rows

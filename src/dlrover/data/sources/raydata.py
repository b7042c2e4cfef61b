"""Ray Data: the rows of a pipeline as a stream, which trainings read while the pipeline runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlrover._util.doors import install
from dlrover.data.sources.parts import Folder
from dlrover.data.sources.stream import Address
from dlrover.errors import ConfigurationError

try:
    import pyarrow as pa
    from ray.data import Datasink
    from ray.data.block import BlockAccessor
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"write_stream needs the package {error.name}: {install('ray,parquet')} 'ray[data]'."
    ) from error


def write_stream(dataset: Any, url: str) -> int:
    """Run a pipeline of Ray Data and add its rows to a stream, each once; return their number.

    Trainings read them as ``Stream(url)``, also before this ends. Call it again after a death of the driver or of the
    cluster: what is there is computed again and compared, and the rest is added. Once it has ended, another call runs nothing.
    The pipeline must be repeatable: the same input, functions and seeds give the same rows in the same order. Its tasks
    give their rows in order (``preserve_order``).

    Args:
        dataset: a ``ray.data.Dataset``.
        url: ``parquet:///FOLDER``, a folder that all machines share.

    Raises:
        ConfigurationError: the address is wrong, a column has Python objects, or an earlier call made other rows.
    """
    folder = Folder(Address(url))
    if folder.begin():
        dataset.context.execution_options.preserve_order = True
        dataset.write_datasink(_PartSink(url))
    mark = folder.mark()
    return sum(mark.rows) if mark is not None else 0


class _PartSink(Datasink):  # type: ignore[misc]  # Ray is not typed here
    """The rows of each task are a part. A task that Ray tries again adds what is missing."""

    def __init__(self, url: str) -> None:
        self._url = url

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:
        tables = [BlockAccessor.for_block(block).to_arrow() for block in blocks]
        tables = [_plain(table) for table in tables if table.num_rows]
        rows = pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
        Folder(Address(self._url)).add(ctx.task_idx, rows)
        return int(ctx.task_idx)

    def on_write_complete(self, write_result: Any) -> None:
        Folder(Address(self._url)).finish(len(write_result.write_returns))


def _plain(table: Any) -> Any:
    """Return a table whose tensors are nested lists, so that who reads it needs no Ray."""
    for number, field in enumerate(table.schema):
        if isinstance(field.type, pa.BaseExtensionType):
            chunks = [_lists(field, chunk) for chunk in table.column(number).chunks]
            table = table.set_column(number, field.name, pa.chunked_array(chunks))
    return table


def _lists(field: Any, chunk: Any) -> Any:
    shape = getattr(field.type, "shape", None)
    if not shape or None in shape or chunk.null_count:
        raise ConfigurationError(
            f"The column {field.name} has values of type {field.type}; numbers, text, bytes, lists, dicts and arrays of"
            " one shape are accepted."
        )
    values = chunk.storage.flatten()
    for size in reversed(shape):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values

"""Embedding checkpoints in a directory, or in any store that Flash Checkpoint writes to.

::

    <directory>/
    └── embedding-<id>/
        ├── begun                 empty; written first
        ├── part-<server>.rows    rows of one server's slots, as `arrays.packed` writes them
        └── manifest.json         a `TableManifest`; written last
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from dlrover._util import decoding
from dlrover.checkpoint.storage.storage import identity
from dlrover.checkpoint.storage.stores import MANIFEST, StorageAwayError, Store, explained, join
from dlrover.embedding.machine import chain
from dlrover.embedding.machine.chain import FORMAT, TableManifest, TablePart
from dlrover.embedding.remote import arrays
from dlrover.errors import FormatError, InfrastructureError, NoRoomError

logger = logging.getLogger(__name__)

ABANDONED = 3600.0
"""Seconds without a change after which a checkpoint without a manifest is deleted."""
Rows: TypeAlias = Iterator[dict[str, NDArray[Any]]]
Take: TypeAlias = Callable[[TableManifest, Rows], None]
CLOCK = "clock/"
"""Before the name of a table, the name of the array with its updates so far."""
_FOLDER = "embedding-"
_BEGUN = "begun"


class _DamagedManifestError(InfrastructureError):
    """Raised for a manifest that cannot be decoded."""


def begin(store: Store) -> str:
    """Make the folder of a new checkpoint; return the checkpoint's id.

    Raises:
        InfrastructureError: The store cannot be written.
    """
    identity(store)
    id_ = secrets.token_hex(8)
    with explained(f"{store.location} cannot be written"):
        store.write(join(_FOLDER + id_, _BEGUN), b"")
    return id_


def write_part(store: Store, id_: str, server: int, found: arrays.Arrays, rows: int) -> TablePart:
    """Write what a server holds of its slots; it is complete when this returns.

    Raises:
        InfrastructureError: The store cannot be written.
    """
    file = join(_FOLDER + id_, f"part-{server}.rows")
    digest, nbytes = xxhash.xxh3_64(), 0
    with explained(f"The embedding checkpoint {store.where(file)} cannot be written"):
        with store.create(file) as writer:
            for piece in arrays.packed(found):
                data = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
                digest.update(data)
                nbytes += data.nbytes
                writer.write(data)
        store.sync(_FOLDER + id_)
    slots = tuple(int(slot) for slot in found["slots"])
    clocks = {
        path.removeprefix(CLOCK): int(array[0])
        for path, array in found.items()
        if path.startswith(CLOCK)
    }
    return TablePart(file, slots, rows, nbytes, digest.hexdigest(), clocks)


def read_part(store: Store, part: TablePart) -> dict[str, NDArray[Any]]:
    """Return what a server had written.

    Raises:
        InfrastructureError: The file is missing or damaged.
    """
    with explained(f"The embedding checkpoint {store.where(part.file)} cannot be read"):
        data = store.read(part.file)
    if len(data) != part.nbytes or xxhash.xxh3_64_hexdigest(data) != part.checksum:
        raise InfrastructureError(
            f"{store.where(part.file)} is damaged: its checksum is not the manifest's."
        )
    return arrays.unpacked(np.frombuffer(data, np.uint8))


def publish(store: Store, manifest: TableManifest) -> None:
    """Write the manifest, which makes a checkpoint of the parts.

    Raises:
        InfrastructureError: The parts are not complete, or the store cannot be written.
    """
    chain.check(manifest)
    file = join(_FOLDER + manifest.id, MANIFEST)
    with explained(f"The embedding checkpoint {store.where(file)} cannot be written"):
        store.write(file, msgspec.json.encode(manifest))


def give_up(store: Store, id_: str) -> None:
    """Delete the parts of a checkpoint unless it is complete; if that fails, `prune` does it later."""
    with contextlib.suppress(OSError):
        if not store.exists(join(_FOLDER + id_, MANIFEST)):
            store.remove(_FOLDER + id_)


def read_manifest(store: Store, id_: str) -> TableManifest:
    """Return a checkpoint's manifest.

    Raises:
        InfrastructureError: It is missing or damaged.
        FormatError: Another version of DLRover wrote it.
    """
    file = join(_FOLDER + id_, MANIFEST)
    with explained(f"The embedding checkpoint {store.where(file)} cannot be read"):
        data = store.read(file)
    try:
        if msgspec.json.decode(data)["format"] != FORMAT:
            raise FormatError(
                f"{store.where(file)} has another format than {FORMAT}: another version wrote it."
            )
        manifest = decoding.json(data, TableManifest)
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise _DamagedManifestError(f"{store.where(file)} is damaged: {error}.") from error
    if manifest.id != id_:
        raise InfrastructureError(f"{store.where(file)} is the one of {_FOLDER}{manifest.id}.")
    return manifest


def complete(store: Store) -> list[str]:
    """Return the ids of all complete checkpoints, in any order."""
    with explained(f"{store.location} cannot be read"):
        ids = [name.removeprefix(_FOLDER) for name in store.names() if name.startswith(_FOLDER)]
        return [id_ for id_ in ids if store.exists(join(_FOLDER + id_, MANIFEST))]


def manifests(store: Store) -> list[TableManifest]:
    """Return all complete checkpoints, the last one first; damaged ones are left out.

    Raises:
        StorageAwayError: They cannot be read now.
        FormatError: Another version of DLRover wrote one.
    """
    return _looked(store)[0]


def _looked(store: Store) -> tuple[list[TableManifest], list[str]]:
    """Return all complete checkpoints, the last one first, and the ids of those with a damaged manifest."""
    damaged: list[str] = []
    found = (_undamaged(store, id_, damaged) for id_ in complete(store))
    return sorted((each for each in found if each is not None), key=order, reverse=True), damaged


def _undamaged(store: Store, id_: str, damaged: list[str]) -> TableManifest | None:
    try:
        return read_manifest(store, id_)
    except (StorageAwayError, FormatError):
        raise
    except InfrastructureError as error:
        logger.warning("An embedding checkpoint is left out: %s", error)
        if isinstance(error, _DamagedManifestError):
            damaged.append(id_)
        return None


def order(manifest: TableManifest) -> tuple[float, int, int]:
    """Return what orders checkpoints: a later one has a larger value, whatever step was gone back to before."""
    return manifest.time, manifest.step, manifest.number


def parts(
    store: Store, newest: TableManifest
) -> Iterator[tuple[TablePart, dict[str, NDArray[Any]]]]:
    """Yield the parts to restore one after the other.

    Raises:
        InfrastructureError: One is missing or damaged.
    """
    for manifest in chain.chain(newest, lambda id_: read_manifest(store, id_)):
        for part in manifest.parts:
            yield part, read_part(store, part)


def restore(store: Store, id_: str, take: Take) -> int:
    """Restore a checkpoint, or if it is damaged the last one before it that is not; return its step.

    Args:
        store: Where the checkpoints are.
        id_: The checkpoint wanted.
        take: Takes a checkpoint and the parts of its chain, in place of all that it took before.

    Raises:
        StorageAwayError: The checkpoints cannot be read now.
        NoRoomError: The rows exceed the limits of a table.
        InfrastructureError: All are damaged.
    """
    found = manifests(store)
    places = [place for place, each in enumerate(found) if each.id == id_]
    candidates = found[places[0] if places else 0 :]
    if not candidates:
        raise InfrastructureError(f"{store.location} has no readable embedding checkpoint.")
    for manifest in candidates[:-1]:
        if _restored(store, manifest, take):
            return manifest.step
    take(candidates[-1], _rows(store, candidates[-1]))
    return candidates[-1].step


def _restored(store: Store, manifest: TableManifest, take: Take) -> bool:
    try:
        take(manifest, _rows(store, manifest))
    except (StorageAwayError, NoRoomError):
        raise
    except InfrastructureError as error:
        logger.warning("The checkpoint before it is taken: %s", error)
        return False
    return True


def _rows(store: Store, manifest: TableManifest) -> Rows:
    return (rows for _, rows in parts(store, manifest))


def prune(store: Store, keep: int) -> bool:
    """Delete all checkpoints but the ``keep`` latest that can be restored, those that they add to, and later ones.

    Returns:
        Whether the latest can be restored: all that it adds to is there.

    Raises:
        StorageAwayError: They cannot be read now.
        InfrastructureError: One cannot be deleted.
    """
    found, damaged = _looked(store)
    whole: list[str] = []
    needed: set[str] = set()
    for manifest in found:
        if len(whole) == keep:
            break
        try:
            links = chain.chain(manifest, lambda id_: read_manifest(store, id_))
        except StorageAwayError:
            raise
        except InfrastructureError as error:
            logger.warning("Step %d of embedding tables is lost: %s", manifest.step, error)
            links = [manifest]
        else:
            whole.append(manifest.id)
        needed |= {each.id for each in links}
    for manifest in found:
        if manifest.id not in needed:
            with explained(f"The embedding checkpoint {manifest.id} cannot be deleted"):
                store.delete(join(_FOLDER + manifest.id, MANIFEST))
                store.remove(_FOLDER + manifest.id)
    _remove_unfinished(store, damaged if len(whole) == keep else [])
    return [each.id for each in found[:1]] == whole[:1]


def _remove_unfinished(store: Store, damaged: Collection[str]) -> None:
    """Delete folders of saves that failed, were killed, or are damaged, `ABANDONED` seconds after the last change."""
    finished = {_FOLDER + id_ for id_ in complete(store) if id_ not in damaged}
    with explained(f"{store.location} cannot be read"):
        names = [
            name for name in store.names() if name.startswith(_FOLDER) and name not in finished
        ]
        for name in names:
            if time.time() - store.modified(name) > ABANDONED:
                store.remove(name)

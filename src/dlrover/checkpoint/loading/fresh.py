"""The decision whether a training that finds nothing to load may start from scratch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from dlrover._util import decoding
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.loading.loader import Loader
from dlrover.checkpoint.loading.memory_step import Lost
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage import first_save, storage
from dlrover.checkpoint.storage.stores import Store, explained, reason
from dlrover.errors import CheckpointsLostError

logger = logging.getLogger(__name__)


class EarlierCheckpoints(msgspec.Struct, frozen=True, array_like=True):
    """Evidence of earlier checkpoints."""

    tracked: SaveId | None
    """The newest save that was ever stored, from `storage.tracked`."""
    recorded: first_save.Whose
    """The job whose ranks all had a save in memory once: none, an earlier one, or this one."""
    unrecorded: str
    """Reason why such a save may have existed without a record; empty if there was none."""


def begin(
    world: TorchWorld,
    store: Store,
    identity: str,
    job: str,
    loader: Loader,
    *,
    start_afresh: bool,
    read_only: bool,
) -> None:
    """Let a training whose load found nothing start from scratch, if no checkpoint is lost. Collective.

    Args:
        world: the ranks.
        store: the checkpoint directory.
        identity: its name.
        job: the loading job.
        loader: the load that found nothing.
        start_afresh: start from scratch even if checkpoints are lost.
        read_only: change nothing; saves in memory are another program's.

    Raises:
        CheckpointsLostError: there was a checkpoint.
        InfrastructureError: a rank cannot read the directory now.
    """
    evidence = gather(world, store, identity, job, loader.unrecorded)
    if read_only:
        evidence = msgspec.structs.replace(evidence, recorded="none")
    lost = loss(evidence, store, loader.problems, loader.lost)
    if lost and read_only:
        raise CheckpointsLostError(lost)
    if lost and not start_afresh:
        raise CheckpointsLostError(
            f"{lost} Remove the directory to start afresh, or give Checkpointer start_afresh=True."
        )
    if lost:
        world.agree(lambda: _forget_first_save(world, store))
    if world.rank == 0:
        level = logging.WARNING if lost or evidence.recorded == "earlier" else logging.INFO
        logger.log(level, "%s", explanation(lost, store, loader.lost, evidence.recorded))


def _forget_first_save(world: TorchWorld, store: Store) -> None:
    """Give up all earlier saves: delete their record, so that the next save writes a new one."""
    if world.rank == 0:
        try:
            first_save.forget(store)
        except OSError as error:
            logger.warning("%s still says that steps were saved: %s", store.location, reason(error))


def gather(
    world: TorchWorld, store: Store, identity: str, job: str, unrecorded: str
) -> EarlierCheckpoints:
    """Combine the evidence that the ranks see. Collective.

    Args:
        world: the ranks.
        store: the checkpoint directory.
        identity: its name.
        job: the loading job.
        unrecorded: the report of this rank's saver.

    Raises:
        InfrastructureError: a rank cannot read the directory now.
    """
    mine = world.agree(lambda: _look(store, identity, job, unrecorded))
    seen = [
        decoding.msgpack(data, EarlierCheckpoints)
        for data in world.gather(msgspec.msgpack.encode(mine))
    ]
    return EarlierCheckpoints(
        max((one.tracked for one in seen if one.tracked is not None), default=None),
        max((one.recorded for one in seen), key=("none", "earlier", "own").index),
        max(one.unrecorded for one in seen),
    )


def _look(store: Store, identity: str, job: str, unrecorded: str) -> EarlierCheckpoints:
    tracked = storage.tracked(store)
    with explained(f"{store.location} cannot be read"):
        found = EarlierCheckpoints(tracked, first_save.recorded(store, identity, job), unrecorded)
        if identity:  # else what was there may be unmounted meanwhile
            storage.check_identity(store, identity)
    return found


def loss(
    evidence: EarlierCheckpoints, store: Store, problems: Sequence[str], lost: Lost | None
) -> str:
    """Describe what was lost; return an empty text if there was never a checkpoint.

    Args:
        evidence: the evidence of earlier checkpoints.
        store: the checkpoint directory.
        problems: why steps could not be loaded.
        lost: a save in memory with missing parts.
    """
    tracked = evidence.tracked
    unsure = evidence.unrecorded if lost is not None else ""
    # An earlier job leaves nothing in memory: saves there are this job's.
    recorded = evidence.recorded == "own" or (evidence.recorded == "earlier" and lost is not None)
    if tracked is None and not (problems or recorded or unsure):
        return ""
    was = "no step was stored"
    if tracked is not None:
        was = (
            f"step {tracked.step} was stored" if tracked.step >= 0 else "the file latest is damaged"
        )
    reasons = [*problems]
    if lost is not None:
        reasons.append(lost.sentence)
    elif not problems and tracked is None:
        reasons.append("All ranks had saved to memory, and nothing is left of that.")
    if unsure and not recorded:
        reasons.append(unsure)
    said = " ".join(reasons) or f"There is no {store.where('step-*')}."
    return f"No checkpoint in {store.location} can be loaded ({was}): {said}"


def explanation(loss: str, store: Store, lost: Lost | None, recorded: first_save.Whose) -> str:
    """Explain, in one or two sentences, why nothing is loaded."""
    if loss:
        return f"{loss} The training starts from scratch, as start_afresh says"
    if lost is not None:
        return (
            f"{lost.sentence} There was never a save of all ranks: the training starts from scratch"
        )
    if recorded == "earlier":
        return f"An earlier job in {store.location} saved to memory only, which ended with it: the training starts from scratch"
    return f"There is no checkpoint in {store.location} yet"

"""A worker group of verl that replaces its dead actors."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
import verl
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from verl.single_controller.ray.base import RayWorkerGroup, SubRayResourcePool

from dlrover import config
from dlrover.errors import ConfigurationError, InfrastructureError, MemberLostError
from dlrover.integrations.verl import deaths
from dlrover.integrations.verl.history import (
    KEPT,
    VARIABLE,
    CallHistory,
    Repair,
    repair as read_repair,
)

logger = logging.getLogger(__name__)

GRACE = 3.0
"""Seconds in which Ray must know of a death that made a call of another rank fail."""
NODE_GRACE = 90.0
"""Seconds in which Ray must know of a death when it says that an actor is not to be reached."""
ELSEWHERE = "it was made by another process, or its actors are detached and open to others"
NEEDED = {
    "__init__": ("resource_pool", "ray_cls_with_init", "bin_pack", "name_prefix", "detached"),
    "_bind_worker_method": ("user_defined_cls", "func_generator"),
    "_init_with_resource_pool": ("resource_pool", "ray_cls_with_init", "bin_pack", "detached", "worker_env"),
    "_init_with_subresource_pool": ("resource_pool", "ray_cls_with_init", "bin_pack", "detached", "worker_env"),
    "execute_all_async": ("method_name",),
    "execute_rank_zero_async": ("method_name",),
    "spawn": ("prefix_set",),
    "spawn_fused": ("prefix_set",),
}  # fmt: skip
"""Methods of verl's group that ours builds on, with arguments."""


def check(cls: type) -> None:
    """Refuse a version of verl whose group lacks what this one needs.

    Raises:
        ConfigurationError: it does.
    """
    for name, words in NEEDED.items():
        method = getattr(cls, name, None)
        known = inspect.signature(method).parameters if method else {}
        for word in ("", *words):
            if method is None or (word and word not in known):
                lacking = f"{cls.__name__}.{name}" + (f"({word})" if word else "")
                raise ConfigurationError(
                    f"verl {verl.__version__} has no {lacking}; dlrover.integrations.verl needs verl 0.9."
                )


check(RayWorkerGroup)


@dataclass(frozen=True)
class Call:
    """A call of a group's actors, after verl has dealt its arguments to the ranks."""

    group: Any
    function: str
    """``execute_all_async`` or ``execute_rank_zero_async`` of verl's group."""
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def start(self) -> Any:
        """Send the call to the actors that there are now; return the references of its results."""
        send = getattr(RayWorkerGroup, self.function)
        return send(self.group, self.method, *self.args, **self.kwargs)

    def kept(self) -> Call:
        """Return the call with its arguments as they are now, in Ray's object store."""
        stored: dict[int, Any] = {}

        def put(value: Any) -> Any:
            if isinstance(value, ray.ObjectRef):
                return value
            if id(value) not in stored:
                stored[id(value)] = ray.put(value)
            return stored[id(value)]

        values = [*self.args, *self.kwargs.values()]
        count = self.group.world_size
        dealt = self.function == "execute_all_async" and all(
            isinstance(value, list) and len(value) == count for value in values
        )
        keep = (lambda value: [put(one) for one in value]) if dealt else put
        kwargs = {name: keep(value) for name, value in self.kwargs.items()}
        return replace(self, args=tuple(keep(value) for value in self.args), kwargs=kwargs)


class SharedActors:
    """What all groups of the same actors have in common.

    Args:
        repair: What follows from a death.
        root: The group that made the actors, if it alone knows them.
    """

    def __init__(self, repair: Repair, root: WorkerGroup | None) -> None:
        self.history = CallHistory(repair, changed="" if root else ELSEWHERE)
        self.root = root
        self._lock = threading.RLock()
        self._life = 0
        self._lost = ""

    def __deepcopy__(self, memo: object) -> SharedActors:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self.history.begins("pickle", "was given to another process by")
        return SharedActors, (self.history.repair, None)

    def answer(self, call: Call) -> Any:
        """Return the results of a call, by new actors if need be.

        Raises:
            MemberLostError: an actor died, and the group is not made anew.
        """
        call = self._begun(call)
        while True:
            with self._lock:  # not while another thread makes the group anew
                life, sent = self._life, self._start(call)
            try:
                results = ray.get(sent)
            except RayError as error:
                with self._lock:
                    if life == self._life:
                        self._after(error, call)
            except BaseException:  # such as Ctrl-C: how far the call came is unknown
                self.history.failed(call.method)
                raise
            else:
                with self._lock:  # actors that are new since then have not had a call that is kept
                    if life == self._life or self.history.kind(call.method) not in KEPT:
                        self._done(call)
                        return results

    def sent(self, call: Call) -> Any:
        """Return the references of a call's results, for which the program waits itself."""
        call = self._begun(call)
        with self._lock:
            references = self._start(call)
            self._done(call)
        return references

    def _begun(self, call: Call) -> Call:
        self.history.begins(call.method)
        return call.kept() if self.history.kind(call.method) in KEPT else call

    def _done(self, call: Call) -> None:
        self.history.done(call.method, call, call.group.sub_cls_name)

    def _start(self, call: Call) -> Any:
        if self._lost:
            raise MemberLostError(self._lost)
        return call.start()

    def _after(self, error: RayError, call: Call) -> None:
        """Make the group anew if an actor's death is behind an error; raise otherwise."""
        actors, during = call.group._workers, call.method  # noqa: SLF001
        while True:
            ranks = deaths.dead(actors, _grace(error, actors))
            if not ranks and during == call.method:
                self.history.failed(call.method)
                raise error
            dead = ""
            why = f"the new actors have failed in {during}: {error}"
            if ranks:
                dead = actors[ranks[0]]._actor_id.hex()  # noqa: SLF001
                self._lost = self._what(call.group, ranks, during, deaths.described(dead))
                why = self._refusal(error)
            try:
                self._make_anew(why)
            except InfrastructureError as reason:
                self._lost = (
                    f"{self._lost}; {reason}. Start the program again from its last checkpoint"
                    f" (trainer.resume_mode=auto).{deaths.last_lines(dead)}"
                )
                raise MemberLostError(self._lost) from error
            except RayError as again:
                error, during = again, "what is repeated after a death"
            else:
                self._lost = ""
                return

    def _refusal(self, error: RayError) -> str:
        """Return why the group is not made anew; empty if it is."""
        if getattr(error, "actor_init_failed", False):
            why = f"its constructor has failed, {error}"
        else:
            why = self.history.refusal(time.monotonic())
        return why and f"the group is not made anew: {why}"

    def _what(self, group: WorkerGroup, ranks: list[int], during: str, described: str) -> str:
        others = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
        name = "+".join(self.history.prefixes) or _class_name(group.ray_cls_with_init)
        return f"Rank {ranks[0]}{others} of {group.world_size} of the group {name} died in {during}, {described}"

    def _make_anew(self, why: str) -> None:
        """Replace all actors and repeat the calls that prepared the old ones, unless there is a reason against it."""
        if why:
            raise InfrastructureError(why)
        logger.warning("%s; the group is made anew", self._lost)
        root, wait = self.root, self.history.repair.wait
        assert root is not None  # its history says why not
        deaths.end(root._workers, wait)  # noqa: SLF001
        deaths.room(root.pool.get_placement_groups(), wait)
        root.create_again()
        self._life += 1
        try:
            ray.get([one.__ray_ready__.remote() for one in root._workers], timeout=wait)  # noqa: SLF001
        except GetTimeoutError:
            raise InfrastructureError(
                f"its new actors have not started within {wait:g} s (wait in {VARIABLE})"
            ) from None
        for _, _, call in self.history.repeated:
            ray.get(call.start())


class WorkerGroup(RayWorkerGroup):
    """verl's `RayWorkerGroup`, whose dead actors are replaced; it takes the same arguments.

    Args:
        repair: What follows from a death; by default what ``DLROVER_VERL`` says.
    """

    def __init__(
        self,
        resource_pool: Any = None,
        ray_cls_with_init: Any = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        *rest: Any,
        repair: Repair | None = None,
        **kwargs: Any,
    ) -> None:
        own = resource_pool is not None and not detached
        self._workers: list[Any] = []
        self._worker_names: list[str] = []
        repair = repair or read_repair(config.environ().get(VARIABLE, ""))
        self.shared = SharedActors(repair, self if own else None)
        self.pool, self._bin_pack = resource_pool, bin_pack
        self._own_address = kwargs.get("master_addr") is not None
        # A pool's placement groups are made by its first group, which waits for them without a word.
        with deaths.explained(f"{getattr(resource_pool, 'name_prefix', '')}verl_group_"):
            super().__init__(
                resource_pool, ray_cls_with_init, bin_pack, name_prefix, detached, *rest, **kwargs
            )

    # ---- calls

    def _bind_worker_method(self, user_defined_cls: Any, func_generator: Any) -> Any:
        def generator(
            group: Any, method_name: str, *, execute_fn: Any, blocking: bool, **fns: Any
        ) -> Any:
            if blocking:  # verl's function then has no more to wait for
                execute_fn = partial(group.wait_for, f"{execute_fn.__name__}_async")
            return func_generator(group, method_name, execute_fn=execute_fn, blocking=False, **fns)

        return super()._bind_worker_method(user_defined_cls, generator)

    def wait_for(self, function: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the results of a call; ``function`` is ``execute_all_async`` or ``execute_rank_zero_async``."""
        return self.shared.answer(Call(self, function, method, args, kwargs))

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the results of all ranks."""
        return self.wait_for("execute_all_async", method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of rank 0."""
        return self.wait_for("execute_rank_zero_async", method_name, *args, **kwargs)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Return references of the results of all ranks."""
        return self.shared.sent(Call(self, "execute_all_async", method_name, args, kwargs))

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Return a reference of the result of rank 0."""
        return self.shared.sent(Call(self, "execute_rank_zero_async", method_name, args, kwargs))

    # ---- those who know the actors

    @property
    def workers(self) -> Any:
        """The actors' handles. Who has them may call them past the group."""
        self.shared.history.begins("workers", "has given its actors away by")
        return self._workers

    @property
    def worker_names(self) -> Any:
        """The actors' names. Who has them may call them past the group."""
        self.shared.history.begins("worker_names", "has given its actors away by")
        return self._worker_names

    def spawn(self, prefix_set: Any) -> Any:
        """Return a group for each of the workers that share the processes."""
        spawned = super().spawn(prefix_set)
        self.shared.history.prefixes[:] = sorted({*self.shared.history.prefixes, *prefix_set})
        for group in spawned.values():
            group.shared = self.shared
            group._workers, group._worker_names = self._workers, self._worker_names  # noqa: SLF001
        return spawned

    def create_again(self) -> None:
        """Make new actors in the same placement groups, with the old ones' names."""
        workers, names = self._workers, self._worker_names
        if not self._own_address:
            self._master_addr = self._master_port = None
        part = isinstance(self.pool, SubRayResourcePool)
        create = self._init_with_subresource_pool if part else self._init_with_resource_pool
        self._workers, self._worker_names = [], []
        try:
            create(
                resource_pool=self.pool, ray_cls_with_init=self.ray_cls_with_init, bin_pack=self._bin_pack,
                detached=False, worker_env=self.customized_worker_env,
            )  # fmt: skip
            workers[:], names[:] = self._workers, self._worker_names
        finally:
            self._workers, self._worker_names = workers, names


def _grace(error: RayError, actors: Sequence[Any]) -> float:
    """Return the seconds in which Ray must know which of these actors is behind an error, if one is."""
    of = getattr(error, "actor_id", None)  # a worker's call of an actor elsewhere raises it, too
    ours = of is None or of in [one._actor_id.hex() for one in actors]  # noqa: SLF001
    return NODE_GRACE if isinstance(error, RayActorError) and ours else GRACE


def _class_name(of: Any) -> str:
    name = type(of.cls).__name__ if of is not None else "of detached workers"
    return name.removeprefix("ActorClass(").removesuffix(")")

"""The original's unified API: what runs in the processes of a role."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from dlrover import config, roles
from dlrover._util import decoding
from dlrover.errors import ConfigurationError
from dlrover.roles.messages import MAX_ITEMS, LookQueue
from dlrover.roles.runtime import worker
from dlrover.roles.runtime.environment import given
from dlrover.roles.runtime.exporting import Marked, exports
from dlrover.roles.runtime.groups import FutureSequence
from dlrover.roles.runtime.queue import WAIT

__all__ = ["FutureSequence"]

VARIABLE = "ORIGINAL_DLROVER_ROLE"
"""Variable with `Hosted`, as JSON."""
_MARK = "_original_rpc"
_POLL = 0.1
"""Seconds between two looks whether a queue is there."""


def _refuse(name: str, instead: str) -> NoReturn:
    raise ConfigurationError(f"{name} does not exist here: use {instead}.")


class Hosted(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the processes of a role know of it beyond `dlrover.roles`."""

    entry: str = ""
    """``module.function`` or ``module.Class``; empty: a script, which runs as it is."""
    is_driver: bool = True
    is_elastic: bool = False
    has_group: bool = False
    """True to set up PyTorch's process group before the program."""
    per_group: int = 1
    accelerator_type: str = "GPU"
    roles: tuple[str, ...] = ()
    """All roles of the job."""


def hosted() -> Hosted:
    """Return what this process knows of its role."""
    return decoding.json(config.environ().get(VARIABLE, "{}"), Hosted)


@dataclass(frozen=True)
class JobInfo:
    """The job of a process."""

    name: str
    job_id: str
    user_config: Any
    accelerator_type: str


@dataclass(frozen=True)
class ActorInfo:
    """The place of a process in its role."""

    name: str
    role: str
    rank: int
    node_rank: int
    local_rank: int


@dataclass(frozen=True)
class Worker:
    """This process."""

    job_info: JobInfo
    actor_info: ActorInfo


def current_worker() -> Worker:
    """Return this process: ``job_info`` and ``actor_info``."""
    worker, known, env = roles.current_worker(), hosted(), config.environ()
    place = divmod(worker.index, known.per_group)
    if known.is_elastic:
        place = int(env["GROUP_RANK"]), int(env["LOCAL_RANK"])
    return Worker(
        JobInfo(worker.job, worker.job, worker.config, known.accelerator_type),
        ActorInfo(f"{worker.role}-{worker.index}", worker.role, worker.index, *place),
    )


def rpc(name: Any = None, export: bool = False) -> Any:
    """Mark a function that other roles may call.

    Those of the entry point's module and of the object of its class are exported when the role starts; one of another
    module with ``export``; one of a script at once.

    Args:
        name: Its name for others, or a function with that name.
        export: True to export it at once.
    """
    known = name if isinstance(name, str) else getattr(name, "__name__", "")

    def mark(function: Any) -> Any:
        setattr(function, _MARK, known or function.__name__)
        of_script = function.__module__ == "__main__" and "." not in function.__qualname__
        if export or of_script:
            export_rpc_method(known or function.__name__, function)
        return function

    return mark


def export_rpc_method(name: str, func: Any) -> None:
    """Let other roles call a function, in a thread of its own."""
    if inspect.iscoroutinefunction(func):
        func = _awaited(func)
    exports.add(name, func, Marked(name, concurrent=True))


def export_rpc_instance(ns: str | None, instance: Any) -> None:
    """Let other roles call the marked methods of an object, as ``ns.method`` if it has a name.

    Raises:
        ConfigurationError: It has none.
    """
    if not export_marked(ns or "", instance):
        raise ConfigurationError(
            f"{type(instance).__qualname__} has no method with @rpc(); other roles have nothing to call."
        )


def export_marked(prefix: str, source: Any) -> int:
    """Export what is marked in a module or an object; return how many."""
    home = source if inspect.ismodule(source) else type(source)
    found = 0
    for attribute in dir(home):
        name = getattr(getattr(home, attribute, None), _MARK, None)
        if isinstance(name, str):
            export_rpc_method(f"{prefix}.{name}" if prefix else name, getattr(source, attribute))
            found += 1
    return found


def _awaited(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return call


def create_rpc_proxy(owner: str, name: str, cls: type) -> Any:
    """Say what to write instead."""
    _refuse("create_rpc_proxy", f'RoleGroup(role)[rank].call("{name}.method", ...)')


class _Refused:
    """What no program can make here."""

    _instead = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse(type(self).__name__, self._instead)


class UserRpcProxy(_Refused):
    """Says what to write instead."""

    _instead = 'RoleGroup(role)[rank].call("name.method", ...)'


class RayDataLoaderIter(_Refused):
    """Says what to write instead."""

    _instead = "torch.utils.data.DataLoader as it is"


class _Master(type):
    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        _refuse(
            f"PrimeMasterApi.{name}", "dlrover.roles.RoleGroup(role).members() or dlrover status"
        )


class PrimeMasterApi(metaclass=_Master):
    """Says what to write instead."""


def patch_dataloader_ray() -> None:
    """Do nothing: the workers of a loader are processes as anywhere."""


class RoleActor:
    """A member of a group.

    Args:
        group: The group.
        rank: Its number in the role.
    """

    def __init__(self, group: RoleGroup, rank: int) -> None:
        self.name, self.rank = f"{group.role}-{rank}", rank
        self._group = group

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method; return the future result."""
        return self._group.call_member(self.rank, method, *args, **kwargs)


class RoleGroup(roles.RoleGroup):
    """The members of a role.

    Args:
        role: Name of the role.
        optional: True if the role may have no members, or not be there.

    Raises:
        ConfigurationError: The job has no such role.
    """

    def __init__(self, role: str, optional: bool = False) -> None:
        name, known = str(getattr(role, "value", role)), hosted().roles
        if known and name not in known and not optional:
            raise ConfigurationError(
                f"RoleGroup({name!r}): must be a role of the job: {', '.join(known)}."
            )
        super().__init__(name, optional=optional)

    def __len__(self) -> int:
        """Return the number of members; wait for the first."""
        return self._wanted()

    def __getitem__(self, index: Any) -> Any:
        return [RoleActor(self, rank) for rank in range(len(self))][index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])


class DataQueue:
    """A queue of the job; what it returns is acknowledged at once.

    Args:
        name: Name of the queue.
        is_master: True to make the queue; otherwise wait until it is made. It belongs to the job.
        size: Items that may wait; that of the master counts.
    """

    def __init__(self, name: str, is_master: bool = False, size: int = 1000) -> None:
        self._name, self._size = name, size if is_master else _size(name)
        self._queue = roles.Queue(name, self._size)
        self._putting: ThreadPoolExecutor | None = None

    def put(self, *obj: Any) -> None:
        """Add items; wait for room."""
        if self._putting is None:
            self._queue.put(*obj)
        else:
            self.put_async(*obj).result()

    def put_async(self, *obj: Any) -> Future[None]:
        """Add items, in the order of the calls; return the future end of it."""
        if self._putting is None:
            self._putting = ThreadPoolExecutor(1, thread_name_prefix="original-put")
            self._puts = roles.Queue(self._name, self._size)
        return self._putting.submit(self._puts.put, *obj)

    def qsize(self) -> int:
        """Return the number of items that wait."""
        return len(self._queue)

    def get(self, batch_size: int = 1) -> list[Any]:
        """Wait for ``batch_size`` items, at most as many as the queue holds, and return them."""
        return self._taken(self._queue.get(min(batch_size, self._size, MAX_ITEMS)))

    def get_nowait(self, max_size: int = 1) -> list[Any]:
        """Return the items that are there."""
        return self._taken(self._queue.get(min(max_size, self._size, MAX_ITEMS), wait=False))

    def _taken(self, items: Any) -> list[Any]:
        if items:
            self._queue.ack(items)
        return list(items)


def _size(name: str) -> int:
    """Wait until a queue is there; return its size."""
    worker = roles.current_worker()
    for _ in range(int(WAIT / _POLL)):
        with contextlib.suppress(ConfigurationError):
            return _looked(worker, name)
        threading.Event().wait(_POLL)
    return _looked(worker, name)


def _looked(worker: Any, name: str) -> int:
    return worker.link.ask(LookQueue(worker.place, name)).size


def main() -> None:
    """Export what is marked in the module and in the object of its class, then run the function or ``run()``.

    A role that is no driver can be called until the job ends.

    Raises:
        ConfigurationError: A driver is a class without ``run()``.
    """
    known = hosted()
    joined = worker.start(ready=False)
    group = _process_group() if known.has_group else None
    module_name, _, name = known.entry.rpartition(".")
    module = importlib.import_module(module_name)
    program: Any = getattr(module, name, None)
    if not callable(program):
        raise ConfigurationError(f"The module {module_name} has no {name} that can be called.")
    export_marked("", module)
    if inspect.isclass(program):
        made = program()
        export_marked("", made)
        program = getattr(made, "run", None)
        if program is None and known.is_driver:
            raise ConfigurationError(
                f"role {given().role}: entry {known.entry}: the class has no run(), so that the role would never end;"
                " add run() or not_driver()."
            )
    joined.ready()
    if program is not None:
        program()
    if not known.is_driver:
        threading.Event().wait()
    if group is not None and group.is_initialized():
        group.destroy_process_group()


def _process_group() -> Any:
    """Set up PyTorch's process group and return its module; None without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch  # noqa: PLC0415 - the program's own
    from torch import distributed  # noqa: PLC0415

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # noqa: TID251 - as programs do
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return distributed

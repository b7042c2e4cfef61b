"""Groups of the members of a role, as other roles call them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, overload

from dlrover.errors import ConfigurationError, ProtocolError
from dlrover.roles.messages import LIVE, JobView, MemberView, RoleView
from dlrover.roles.runtime import payload
from dlrover.roles.runtime.calls import RoleCall
from dlrover.roles.runtime.connections import EncodedCall
from dlrover.roles.runtime.link import check_process
from dlrover.roles.runtime.phases import Awaited
from dlrover.roles.runtime.worker import current_worker
from dlrover.spec.words import did_you_mean

WAIT = 600.0
"""Seconds that a call waits for a member that is not there."""


class RoleGroup:
    """The members of a role, as they come and go. Making one waits for nothing.

    Args:
        role: Name of the role.
        optional: True if the role may have no members, or not be there: `call` then returns nothing.
        wait: Seconds that a call waits for a member that is not there or is replaced.

    Raises:
        ConfigurationError: The job has no such role.
    """

    def __init__(self, role: str, *, optional: bool = False, wait: float = WAIT) -> None:
        self.role, self.optional, self.wait_seconds = role, optional, wait
        self._worker = current_worker()
        if not optional:
            check_role(self._worker.members, role)

    def __len__(self) -> int:
        """Return the number of live members."""
        return len(self.members())

    def __iter__(self) -> Iterator[MemberView]:
        return iter(self.members())

    @property
    def epoch(self) -> int:
        """A number that changes whenever the members, or which of them serve, change."""
        return self._view().epoch

    def members(self, *, serving: bool = False) -> tuple[MemberView, ...]:
        """Return the live members; only those that serve with ``serving``.

        A member that was recovered serves only once it works with the current version of the weights that its role
        uses.
        """
        return tuple(
            one for one in self._view().members if (one.serving if serving else one.state == LIVE)
        )

    def changed(self, epoch: int, timeout: float = WAIT) -> int:
        """Wait until `epoch` is another one than ``epoch``, and return it.

        Raises:
            InfrastructureError: It is the same after ``timeout`` seconds.
        """

        def other(view: JobView) -> int:
            now = view.role(self.role).epoch
            return now if now != epoch else 0

        what = f"a change of the members of {self.role}"
        return self._worker.link.wait(other, timeout, what)

    def wait(
        self, count: int = 1, timeout: float = WAIT, *, serving: bool = False
    ) -> tuple[MemberView, ...]:
        """Wait until there are ``count`` members, and return them.

        Raises:
            ConfigurationError: The role never has that many members, or the job has no such role.
            InfrastructureError: There are fewer after ``timeout`` seconds.
        """
        check_count(self._worker.members, self.role, count)
        what = f"{count} members of {self.role}{' that serve' if serving else ''}"
        self._worker.link.wait(lambda _: len(self.members(serving=serving)) >= count, timeout, what)
        return self.members(serving=serving)

    def call(
        self, method: str | Callable[..., Any], *args: Any, _scatter: bool = False, **kwargs: Any
    ) -> FutureSequence:
        """Call a method of all members; return their results by index, as they come.

        A member that is being replaced is waited for; one that an elastic role has lost for now is not: its call fails. With ``_scatter``, each argument is a sequence with one element
        for each member.

        Raises:
            ConfigurationError: An argument cannot be sent.
        """
        count = self._wanted()
        if not _scatter:
            encoded = _encoded(method, args, kwargs)
            calls = [self._made(encoded, index, of_all=True) for index in range(count)]
        else:
            _check_lengths(count, [*args, *kwargs.values()], "member")
            calls = [
                self._made(
                    _encoded(
                        method,
                        [arg[i] for arg in args],
                        {key: arg[i] for key, arg in kwargs.items()},
                    ),
                    i,
                    of_all=True,
                )
                for i in range(count)
            ]
        self._submit(calls)
        return FutureSequence([call.future for call in calls])

    def call_rank0(
        self, method: str | Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Call a method of the member with index 0; return the future result. Otherwise as `call`."""
        return self.call_member(0, method, *args, **kwargs)

    def call_member(
        self, index: int, method: str | Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Call a method of one member; return the future result. Otherwise as `call`.

        Raises:
            ConfigurationError: The role can never have this member, or an argument cannot be sent.
        """
        check_index(self._worker.members, self.role, index)
        call = self._made(_encoded(method, args, kwargs), index)
        self._submit([call])
        return call.future

    def call_batch(
        self,
        method: str | Callable[..., Any],
        size: int,
        *sequences: Any,
        _chunk: int = 0,
        **kwargs: Any,
    ) -> FutureSequence:
        """Call a method with parts of a batch, on whichever members serve; return one result for each element.

        The method gets lists and returns as many results as they have elements. A member gets another part when it
        has answered. If a member dies, its part goes to another one where the method is idempotent; otherwise its
        elements fail, and no others do.

        Args:
            method: Name of the method, or the function itself.
            size: Number of elements.
            sequences: Each has ``size`` elements, and is cut into parts; others than lists, tuples and arrays are
                passed whole.
            _chunk: Elements of a part; 0: one part for each member.
            kwargs: Passed whole.

        Raises:
            ConfigurationError: An argument cannot be sent, or has another length.
        """
        whole = [not _is_cut(one) for one in sequences]
        _check_lengths(
            size,
            [one for one, is_whole in zip(sequences, whole, strict=True) if not is_whole],
            "element",
        )
        if not size:
            return FutureSequence([])
        check_role(self._worker.members, self.role)
        members = len(self.members(serving=True)) or self._view().instances or 1
        chunk = _chunk or -(-size // members)
        calls, lengths = [], []
        for first in range(0, size, chunk):
            part = slice(first, min(first + chunk, size))
            args = [
                one if is_whole else one[part]
                for one, is_whole in zip(sequences, whole, strict=True)
            ]
            calls.append(self._made(_encoded(method, args, kwargs), -1))
            lengths.append(part.stop - first)
        self._submit(calls)
        return FutureSequence([call.future for call in calls], lengths)

    def _view(self) -> RoleView:
        check_process(self._worker.pid)
        return self._worker.link.view.role(self.role)

    def _wanted(self) -> int:
        if self.optional and not self._view().members:
            return 0
        self._worker.link.wait(
            lambda view: view.role(self.role).instances,
            self.wait_seconds,
            f"the first member of the role {self.role}",
        )
        return self._view().instances

    def _made(self, encoded: EncodedCall, index: int, *, of_all: bool = False) -> RoleCall:
        future = Awaited[Any](self._worker.phases)
        return RoleCall(self.role, index, encoded, self.wait_seconds, of_all, future)

    def _submit(self, calls: list[RoleCall]) -> None:
        if calls:
            self._worker.calls.submit(*calls)


class FutureSequence(Sequence[Any]):
    """Results that come one by one; reading one waits for it, and raises if its call has failed.

    Args:
        futures: Futures of the calls.
        lengths: Results of each; None: each call has one, which is not a list of them.
    """

    def __init__(self, futures: list[Future[Any]], lengths: list[int] | None = None) -> None:
        self.futures, self._lengths = futures, lengths

    def __len__(self) -> int:
        return len(self.futures) if self._lengths is None else sum(self._lengths)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"result {index} of {len(self)}")
        if self._lengths is None:
            return self.futures[place].result()
        for future, length in zip(self.futures, self._lengths, strict=True):
            if place < length:
                return _checked(future.result(), length)[place]
            place -= length
        raise AssertionError

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for all results and return them; raise the first error.

        Raises:
            TimeoutError: A call is still under way after ``timeout`` seconds.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        found: list[Any] = []
        for place, future in enumerate(self.futures):
            left = None if timeout is None else max(0.0, until - time.monotonic())
            value = future.result(left)
            found += (
                [value] if self._lengths is None else list(_checked(value, self._lengths[place]))
            )
        return found

    wait = result

    def errors(self) -> dict[int, Exception]:
        """Wait for all results; return the errors of those that have failed, by their place."""
        found: dict[int, Exception] = {}
        first = 0
        for future, length in zip(
            self.futures, self._lengths or [1] * len(self.futures), strict=True
        ):
            try:
                value = future.result()
                if self._lengths is not None:
                    _checked(value, length)
            except Exception as error:  # noqa: BLE001 - it is the result
                found |= dict.fromkeys(range(first, first + length), error)
            first += length
        return found


def check_role(members: Mapping[str, int], role: str) -> None:
    """Refuse a role that the job does not have; ``members`` has the maximum number of each role, or nothing.

    Raises:
        ConfigurationError: It has none of this name.
    """
    if members and role not in members:
        hint = did_you_mean(role, members) or f" It has {', '.join(members)}."
        raise ConfigurationError(f"The job has no role {role}.{hint}")


def check_index(members: Mapping[str, int], role: str, index: int) -> None:
    """Refuse a member that a role can never have; ``members`` is as for `check_role`.

    Raises:
        ConfigurationError: It can have no such member, or the job has no such role.
    """
    check_role(members, role)
    if index < 0 or index >= members.get(role, index + 1):
        last = f"; its last one is {role} {members[role] - 1}" if members else ""
        raise ConfigurationError(f"The role {role} never has a member {index}{last}.")


def check_count(members: Mapping[str, int], role: str, count: int) -> None:
    """Refuse a number of members that a role can never have; ``members`` is as for `check_role`.

    Raises:
        ConfigurationError: It can never have that many members, or the job has no such role.
    """
    check_role(members, role)
    if count > (most := members.get(role, count)):
        raise ConfigurationError(
            f"The role {role} never has {count} members; its maximum is {most}, which is what can be waited for."
        )


def _encoded(
    method: str | Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> EncodedCall:
    name = method if isinstance(method, str) else method.__name__
    return EncodedCall(name, *payload.encode_call(name, args, kwargs))


def _is_cut(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return True
    return hasattr(value, "shape") and len(value.shape) > 0


def _check_lengths(count: int, sequences: Sequence[Any], what: str) -> None:
    for place, one in enumerate(sequences, 1):
        if len(one) != count:
            raise ConfigurationError(
                f"Sequence {place} has {len(one)} elements; it must have one for each {what}: {count}."
            )


def _checked(value: Any, length: int) -> Any:
    if not hasattr(value, "__len__") or len(value) != length:
        got = f"{len(value)}" if hasattr(value, "__len__") else f"a {type(value).__name__}"
        raise ProtocolError(
            f"A method that is called with a batch must return one result for each element: {length}, not {got}."
        )
    return value

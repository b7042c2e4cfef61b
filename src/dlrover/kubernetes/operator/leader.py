"""Leader election with a Lease: one of several operators works while the others stand by."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api.client import CONFLICTS, LEASES, ApiError, Client
from dlrover.kubernetes.resources import times
from dlrover.kubernetes.resources.types import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTerms:
    """Periods of a Lease in seconds; ``renew < deadline < duration`` must hold."""

    duration: float = 15.0
    """Time without a renewal after which any operator may take the Lease."""
    deadline: float = 10.0
    """Time without a successful renewal after which a leader stops."""
    renew: float = 2.0
    """Time between two attempts."""


class Leader:
    """Holds the Lease ``namespace/name`` as ``identity``, or waits for it.

    A foreign Lease has expired once this process has seen it unchanged for its duration on its own clock.
    The clocks of two machines need not agree.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        identity: str,
        terms: LeaseTerms = LeaseTerms(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._namespace, self._name = client, namespace, name
        self._identity, self._terms, self._clock = identity, terms, clock
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0
        self._renewed_at = 0.0

    @property
    def informed(self) -> bool:
        """True once it has read the Lease."""
        return bool(self._seen)

    async def acquire(self) -> None:
        """Wait until this process holds the Lease."""
        while True:
            if await self._attempt():
                break
            await asyncio.sleep(self._terms.renew)
        logger.info(
            "%s is the leader by the Lease %s/%s", self._identity, self._namespace, self._name
        )

    async def hold(self) -> str:
        """Renew the Lease until it is lost; return why, as a sentence."""
        while True:
            await asyncio.sleep(self._terms.renew)
            left = self._renewed_at + self._terms.deadline - self._clock()
            try:
                held = await asyncio.wait_for(self._attempt(), max(0.1, left))
            except asyncio.TimeoutError:
                held = False
            if not held and (
                self._clock() - self._renewed_at >= self._terms.deadline or self._seen_other()
            ):
                lease = f"The Lease {self._namespace}/{self._name}"
                if self._seen_other():
                    return f"{lease} belongs to another operator, {self._seen[0]}."
                return f"{lease} could not be renewed for {self._terms.deadline:g} s."

    async def release(self) -> None:
        """Give the Lease back, so that another operator need not wait for it to expire."""
        for attempt in range(1, CONFLICTS + 1):
            try:
                lease = await self._client.get(LEASES, self._namespace, self._name)
                if lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._client.replace(LEASES, lease)
            except InfrastructureError as error:
                # 409: conflict with our own renewal in progress
                if isinstance(error, ApiError) and error.status == 409 and attempt < CONFLICTS:
                    continue
                where = f"{self._namespace}/{self._name}"
                logger.info("The Lease %s is not released: %s", where, error)
            return

    async def _attempt(self) -> bool:
        """Take or renew the Lease if this process holds it, it has no holder, or it has expired."""
        began = self._clock()
        try:
            lease = await self._client.find(LEASES, self._namespace, self._name)
            taken = lease is None or self._free(lease)
            if taken:
                await self._write(lease)
                self._renewed_at = began
        except ApiError as error:
            if error.status not in (404, 409):  # 409: another operator was faster
                logger.warning("The Lease %s/%s: %s", self._namespace, self._name, error)
            return False
        except InfrastructureError as error:
            logger.warning("The Lease %s/%s: %s", self._namespace, self._name, error)
            return False
        return taken

    def _free(self, lease: Manifest) -> bool:
        spec = lease.get("spec") or {}
        self._see(spec)
        duration = float(spec.get("leaseDurationSeconds") or self._terms.duration)
        return (
            spec.get("holderIdentity") in (None, "", self._identity)
            or self._clock() - self._seen_at > duration
        )

    def _see(self, spec: Manifest) -> None:
        seen = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._clock()

    def _seen_other(self) -> bool:
        return bool(self._seen) and self._seen[0] not in (None, "", self._identity)

    async def _write(self, lease: Manifest | None) -> None:
        now = times.written_micro(time.time())
        before = (lease or {}).get("spec") or {}
        ours = before.get("holderIdentity") == self._identity
        transitions = int(before.get("leaseTransitions") or 0)
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self._terms.duration) or 1,
            "acquireTime": before.get("acquireTime") if ours else now,
            "renewTime": now,
            "leaseTransitions": transitions if ours or lease is None else transitions + 1,
        }
        if lease is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            await self._client.create(LEASES, {"metadata": metadata, "spec": spec})
        else:  # its resource version makes this fail after another write
            await self._client.replace(LEASES, {**lease, "spec": spec})
        self._see(spec)

"""The job of one role on Kubernetes: ``python -m dlrover.cli.cluster.elasticrole --job-dir DIR --attempt N``.

It makes the role's ElasticJob, or goes on with the one that there is, copies its events and its outcome into the job
directory, and removes it. It runs in the coordinator's pod and may end at any moment: the ElasticJob goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dlrover import config
from dlrover._util import files, logs, procs, tasks
from dlrover.cli import jobs
from dlrover.cli.cluster import rolesonkubernetes
from dlrover.errors import ConfigurationError, DLRoverError, ExitCode, InfrastructureError
from dlrover.kubernetes.api.client import ELASTIC_JOBS, PODS, ApiError, Client, Patience
from dlrover.kubernetes.api.informer import Informer
from dlrover.kubernetes.machine import objects, pods
from dlrover.kubernetes.machine.decisions import status_of
from dlrover.kubernetes.platform import job as elastic_job
from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.types import ElasticJob, Manifest
from dlrover.master.journal.history import History, known_before
from dlrover.roles.client import load_config
from dlrover.rpc.client import MasterClient
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.jobdir import JobDir, MasterAddress, MasterConfig
from dlrover.spec.outcome import Outcome

logger = logging.getLogger(__name__)

RETRY = 0.5
"""Seconds between attempts to reach the API server or a master, and between looks at what is to go."""
STOP_WAIT = 60.0 + Limits().release_grace
"""Seconds beyond its role's shutdown time-out in which a stopped role may end by itself; then it is deleted."""
GONE_WAIT = 90.0
"""Seconds for the pods of an earlier start to go, before the next start no longer waits for them."""

STOPPED = Outcome(exit_code=ExitCode.STOPPED, reason="The role was stopped.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job of one role to its end; return its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=main.__doc__)
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--env", default="", help="Names of variables of the role's pods.")
    parser.add_argument("--lifeline-fd", type=int, default=-1, help="Leave when it closes.")
    args = parser.parse_args(argv)
    job_dir = JobDir(args.job_dir)
    env = config.environ()
    logs.log_to(job_dir.path / "kubernetes.log")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    given = {name: env[name] for name in args.env.split(",") if name in env}
    try:
        outcome = asyncio.run(_run(job_dir, env, args.attempt, given, args.lifeline_fd))
    except _DeletedError:
        said = f"role {job_dir.path.name}: its ElasticJob was deleted: it starts again."
        print(f"dlrover: {said}", file=sys.stderr, flush=True)
        return ExitCode.INFRASTRUCTURE
    except DLRoverError as error:
        logger.exception("The role's job ends")
        outcome = Outcome(exit_code=error.exit_code, reason=str(error))
    if outcome is None:
        return ExitCode.INFRASTRUCTURE
    files.write_atomically(job_dir.outcome, msgspec.json.encode(outcome))
    return outcome.exit_code


class _DeletedError(Exception):
    """The role's ElasticJob was deleted: the role has to start again."""


async def _run(
    job_dir: JobDir,
    env: Mapping[str, str],
    attempt: int,
    given: Mapping[str, str],
    lifeline_fd: int,
) -> Outcome | None:
    stopping, orphaned = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    if lifeline_fd >= 0:
        procs.Lifeline.watch(lifeline_fd, orphaned.set)
    async with Client.from_config() as client:
        work = _work(client, job_dir, env, attempt, given, stopping)
        running, leaving = asyncio.create_task(work), asyncio.create_task(orphaned.wait())
        await asyncio.wait([running, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if running.done():
            return await running
        await tasks.stop([running])
        return None


async def _work(
    client: Client,
    job_dir: JobDir,
    env: Mapping[str, str],
    attempt: int,
    given: Mapping[str, str],
    stopping: asyncio.Event,
) -> Outcome:
    parent = await elastic_job.awaited(client, env, stopping)
    if parent is None:
        return STOPPED
    return await ElasticRole(client, job_dir, parent, attempt, given, stopping).run()


class ElasticRole:
    """The ElasticJob of one start of a role. Use it on one event loop, once."""

    def __init__(
        self,
        client: Client,
        job_dir: JobDir,
        parent: ElasticJob,
        attempt: int,
        env: Mapping[str, str],
        stopping: asyncio.Event,
    ) -> None:
        content = load_config(JobDir(job_dir.path.parents[1]))
        self._role = content.job.role(job_dir.path.name)
        self._client, self._dir, self._parent, self._stopping = client, job_dir, parent, stopping
        self._manifest = rolesonkubernetes.job_of(parent, self._role, content, attempt, env)
        self._namespace, self._name = parent.namespace, self._manifest["metadata"]["name"]
        self._token, self._tls = env[rolesonkubernetes.TOKEN], content.tls
        self._uid, self._address = "", ""
        self._outcome: Outcome | None = None
        self._changed = asyncio.Event()
        self._jobs = Informer(
            client,
            ELASTIC_JOBS,
            self._namespace,
            "",
            self._wake,
            fields=f"metadata.name={self._name}",
        )
        labels = f"{names.JOB_LABEL}={self._name},{names.ROLE_LABEL}={names.MASTER_ROLE}"
        self._masters = Informer(client, PODS, self._namespace, labels, self._wake)

    def _wake(self, _key: str) -> None:
        self._changed.set()

    async def run(self) -> Outcome:
        """Follow the role's ElasticJob to its end.

        Raises:
            ConfigurationError: there is another object of its name, or the API server refuses it for good.
            _DeletedError: it was deleted.
        """
        if not await self._ensure():
            return STOPPED
        self._describe()
        history = History(self._dir.events)
        following = asyncio.create_task(self._follow(history))
        ending = asyncio.create_task(self._until_ended())
        watching = [asyncio.create_task(one.run()) for one in (self._jobs, self._masters)]
        try:
            await asyncio.wait([following, ending], return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                await following  # it ends only by an error
            outcome = await ending
        finally:
            await tasks.stop([following, ending, *watching])
            history.close()
        if outcome.exit_code == ExitCode.SUCCESS or self._stopping.is_set():
            await remove(self._client, self._namespace, self._name, self._uid)
        return outcome

    # ---- the object

    async def _ensure(self) -> bool:
        """Make the ElasticJob, or find that of this start; return False if the role is stopped meanwhile."""
        patience = Patience()
        while not self._stopping.is_set():
            try:
                found = await self._found()
                if self._is_ours(found):
                    self._uid = found["metadata"]["uid"]
                    return True
                await remove(self._client, self._namespace, self._name, found["metadata"]["uid"])
            except InfrastructureError as error:
                taken = isinstance(error, ApiError) and error.reason == "AlreadyExists"
                if not (taken or patience.outwaits(error)):
                    raise ConfigurationError(str(error)) from error
                logger.warning("The ElasticJob %s is not made yet: %s", self._name, error)
            await asyncio.sleep(RETRY)
        return False

    async def _found(self) -> Manifest:
        """Return the ElasticJob of the role's name, made now if this start has none yet."""
        found = await self._client.find(ELASTIC_JOBS, self._namespace, self._name)
        if found is None and self._dir.events.exists():
            raise _DeletedError
        return found or await self._client.create(ELASTIC_JOBS, self._manifest)

    def _is_ours(self, found: Manifest) -> bool:
        """Return whether an ElasticJob is that of this start, and not one of an earlier start.

        Raises:
            ConfigurationError: it is no role's of a job of this name.
        """
        above = objects.parent(found["metadata"])
        if above is None or above["name"] != self._parent.name:
            raise ConfigurationError(
                f"Namespace {self._namespace} already has an ElasticJob {self._name}, which is "
                "not a role of this job; delete it, or give the job another name."
            )
        start = (found["metadata"].get("annotations") or {}).get(names.ATTEMPT)
        wanted = self._manifest["metadata"]["annotations"][names.ATTEMPT]
        return bool(above["uid"] == self._parent.uid and start == wanted)

    def _describe(self) -> None:
        """Write what commands need to reach the role's master from the coordinator's pod."""
        job = JobSpec(name=self._name)
        content = MasterConfig(job=job, platform="kubernetes", tls=self._tls)
        jobs.write(self._dir, self._dir.job, msgspec.json.encode(content))
        jobs.write_token(self._dir, self._token)

    # ---- its life

    async def _until_ended(self) -> Outcome:
        await asyncio.gather(self._jobs.synced.wait(), self._masters.synced.wait())
        stop: asyncio.Task[None] | None = None
        late = float("inf")
        try:
            while True:
                self._changed.clear()
                self._look_at_master()
                found = self._jobs.cache.get(f"{self._namespace}/{self._name}")
                if found is None or found["metadata"]["uid"] != self._uid:
                    if not self._stopping.is_set():
                        raise _DeletedError
                    return STOPPED
                if status_of(found).completion_time:
                    return self._outcome or _outcome(found)
                if self._stopping.is_set() and stop is None:
                    stop = asyncio.create_task(self._stop())
                    late = time.monotonic() + self._role.shutdown_timeout + STOP_WAIT
                if time.monotonic() > late:
                    return Outcome(
                        exit_code=ExitCode.STOPPED, reason="The role did not stop in time."
                    )
                await tasks.signalled(self._changed, RETRY)
        finally:
            if stop is not None:
                stop.cancel()

    def _look_at_master(self) -> None:
        """Note where the role's master is."""
        pod = self._masters.cache.get(f"{self._namespace}/{names.master_name(self._name)}")
        if pod is None or not pods.owned(pod, self._uid) or pods.ended(pod):
            return
        ip = str((pod.get("status") or {}).get("podIP") or "")
        address = f"[{ip}]" if ":" in ip else ip
        if ip and address != self._address.rpartition(":")[0]:
            self._address = f"{address}:{names.MASTER_PORT}"
            known = MasterAddress(self._address, os.getpid())
            files.write_atomically(self._dir.master, msgspec.json.encode(known))

    def _master(self) -> MasterClient:
        return MasterClient(self._address, self._token, self._tls)

    async def _stop(self) -> None:
        """Ask the role's master to end its job, until it has the request."""
        while True:
            with contextlib.suppress(InfrastructureError):
                if self._address:
                    async with self._master() as master:
                        await master.stop("The coordinator stops the role.", ExitCode.STOPPED)
                    return
            await asyncio.sleep(RETRY)

    async def _follow(self, history: History) -> None:
        """Copy the master's events, also of one that begins anew without the journal of the last."""
        history.follow(history.recorded)
        while True:
            try:
                if self._address:
                    async with self._master() as master:
                        await self._copy(master, history)
            except InfrastructureError as error:
                logger.info("Its master does not answer: %s", error)
            await asyncio.sleep(RETRY)

    async def _copy(self, master: MasterClient, history: History) -> None:
        before = -1
        async for notice in master.watch(0, follow=True):
            if notice.events and before < 0:
                before = known_before(history.events, notice.events[0])
            for event in notice.events:
                if before + event.seq > len(history.events):
                    history.add(event.body, event.time)
            self._outcome = notice.status.outcome or self._outcome


def _outcome(job: Manifest) -> Outcome:
    """Return the outcome of a job as its ElasticJob says it, where its master could not."""
    status = status_of(job)
    if status.phase == "Succeeded":
        return Outcome(exit_code=ExitCode.SUCCESS, reason=status.message)
    reasons = {condition.reason for condition in status.conditions if condition.type == "Failed"}
    return Outcome(exit_code=pods.exit_code_of(reasons), reason=status.message)


async def remove(client: Client, namespace: str, name: str, uid: str) -> None:
    """Delete an ElasticJob and wait until its pods have gone, which may hang on a machine that is away."""
    late = time.monotonic() + GONE_WAIT
    while time.monotonic() < late:
        try:
            await client.delete(ELASTIC_JOBS, namespace, name, uid)
            left, _ = await client.list(PODS, namespace, f"{names.JOB_LABEL}={name}")
            if not any(pods.owned(pod, uid) for pod in left):
                return
        except InfrastructureError as error:
            logger.warning("The ElasticJob %s is not removed yet: %s", name, error)
        await asyncio.sleep(RETRY)
    logger.warning("Pods of %s have not gone within %g s", name, GONE_WAIT)


async def clear(job: ElasticJob) -> None:
    """Remove the ElasticJobs of roles whose coordinator has lost its journal: they cannot go on with another one.

    Raises:
        InfrastructureError: the API server does not answer.
    """
    async with Client.from_config() as client:
        for role in job.spec.roles:
            name = names.job_of_role(job.name, role)
            found = await client.find(ELASTIC_JOBS, job.namespace, name)
            above = objects.parent(found["metadata"]) if found is not None else None
            if found is not None and above is not None and above["name"] == job.name:
                print(
                    f"dlrover: role {role} starts again: the coordinator has lost its journal.",
                    file=sys.stderr,
                )
                await remove(client, job.namespace, name, found["metadata"]["uid"])


if __name__ == "__main__":
    sys.exit(main())

"""Whether one machine has what the roles of a job need."""

from __future__ import annotations

import os

from dlrover import accelerators
from dlrover._util import cgroup
from dlrover.errors import ConfigurationError
from dlrover.roles.spec import RolesJob, RoleSpec
from dlrover.spec.words import gib


def check_here(job: RolesJob) -> None:
    """Refuse a job that needs more than this machine has; name what each role needs.

    Raises:
        ConfigurationError: the cores, the memory or the accelerators do not suffice.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    within = cgroup.memory()
    memory = total if within is None else min(total, within[1])
    check(job, cgroup.cores(), memory, len(accelerators.present().device_files()))


def check(job: RolesJob, cores: float, memory: int, gpus: int = 0) -> None:
    """Refuse a job that needs more cores, bytes of memory or accelerators than these; roles of a group take turns."""
    for what, has, needs, words in (
        ("cores", cores, lambda role: role.size.cpu, "{:g}".format),
        ("of memory", memory, lambda role: float(role.size.memory), gib),
        ("GPUs", gpus, lambda role: role.gpus, "{:g}".format),
    ):
        wanted = {role.name: role.most * needs(role) for role in job.roles if needs(role)}
        if _together(job, wanted) > has:
            each = ", ".join(
                f"{name} {job.role(name).most} x {words(needs(job.role(name)))}" for name in wanted
            )
            raise ConfigurationError(
                f"resources: the roles need {words(_together(job, wanted))} {what}, and this machine has "
                f"{words(has)}: {each}."
            )


def _together(job: RolesJob, wanted: dict[str, float]) -> float:
    """Return the sum over groups of what their largest role wants."""
    groups: dict[str, float] = {}
    for name, amount in wanted.items():
        group = _group(job.role(name))
        groups[group] = max(groups.get(group, 0.0), amount)
    return sum(groups.values())


def _group(role: RoleSpec) -> str:
    return f"group {role.collocate}" if role.collocate else role.name

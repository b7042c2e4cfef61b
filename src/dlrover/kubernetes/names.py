"""Names, labels and ports by which the operator, the master and users find a job's objects."""

from __future__ import annotations

GROUP = "elastic.iml.github.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

JOB_LABEL = f"{GROUP}/job-name"
"""On every object of a job: the job's name."""
ROLE_LABEL = f"{GROUP}/replica-type"
"""On every pod of a job: ``worker``, ``ps``, ``chief``, ``evaluator`` or ``dlrover-master``."""
MEMORY_FACTOR = f"{GROUP}/memory-factor"
"""An annotation of a pod: how many times the memory of its template it was given, or of the first master."""
CPU_FACTOR = f"{GROUP}/cpu-factor"
"""The same of its cores."""
MASTER_ROLE = "dlrover-master"
MANAGER = f"{GROUP}/operator"
"""The value of ``spec.managedBy`` that names this operator; so does an empty one."""
MASTER_PORT = 50001
"""Where a job's master listens, as in the original."""
TOKEN_KEY = "token"  # noqa: S105 - the name of a field
"""The key of the job's token in its Secret."""
LONGEST_NAME = 63 - len("elasticjob--dlrover-master")
"""A job's name may have so many characters: the name of its master's Service is a DNS label."""
JOB_NAME = "[a-z]([-a-z0-9]*[a-z0-9])?"
"""A regular expression for a job's whole name."""


def master_name(job: str) -> str:
    """The name of the master's pod and Service."""
    return f"elasticjob-{job}-dlrover-master"


def own_name(job: str, uid: str) -> str:
    """The name of the Secret and the account of one job, which no earlier job of its name had.

    What an earlier job has left may still be there, and go any time.
    """
    return f"{master_name(job)}-{uid.partition('-')[0]}"


def labels(job: str, role: str = "") -> dict[str, str]:
    """The labels of an object of a job, with the ones that are usual for all objects."""
    own = {
        JOB_LABEL: job,
        "app.kubernetes.io/name": "dlrover",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/managed-by": "dlrover-operator",
    }
    return own | ({ROLE_LABEL: role, "app.kubernetes.io/component": role} if role else {})

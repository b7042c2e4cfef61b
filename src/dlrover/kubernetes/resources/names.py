"""Names, labels and ports by which the operator, the master and users find a job's objects."""

from __future__ import annotations

GROUP = "elastic.iml.github.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

JOB_LABEL = f"{GROUP}/job-name"
"""Label on every object of a job: the job's name."""
ROLE_LABEL = f"{GROUP}/replica-type"
"""Label on every pod of a job: ``worker``, ``ps``, ``chief``, ``evaluator`` or ``dlrover-master``."""
INSTANCES = f"{GROUP}/instances-of"
"""Annotation of a job whose pods are independent instances: the name of their role."""
ATTEMPT = f"{GROUP}/attempt"
"""Annotation of the job of a role: which start of the role it is."""
MEMORY_FACTOR = f"{GROUP}/memory-factor"
"""Pod annotation: memory multiplier relative to the pod's template or, for a master, the first master."""
MASTER_NUMBER = f"{GROUP}/master-number"
"""Annotation of a master's pod: which of the job's masters it is, from 1."""
MAIN_CONTAINER = f"{GROUP}/main-container"
"""Annotation of a pod whose main container is not called ``main``: its name. Admission may put another one first."""
CPU_FACTOR = f"{GROUP}/cpu-factor"
"""Pod annotation: CPU multiplier relative to the pod's template."""
MASTER_ROLE = "dlrover-master"
MANAGER = f"{GROUP}/operator"
"""Value of ``spec.managedBy`` that selects this operator, as an empty value does."""
MASTER_PORT = 50001
"""Port of a job's master, as in the original."""
TOKEN_KEY = "token"  # noqa: S105 - the name of a field
"""Key of the job's token in its Secret."""
LONGEST_NAME = 63 - len("elasticjob--dlrover-master")
"""Maximum length of a job's name: the name of its master's Service is a DNS label."""
JOB_NAME = "[a-z]([-a-z0-9]*[a-z0-9])?"
"""Regular expression for a complete job name."""


def master_name(job: str) -> str:
    """Return the name of the master's pod and Service."""
    return f"elasticjob-{job}-dlrover-master"


def job_of_role(job: str, role: str) -> str:
    """Return the name of the ElasticJob of a role."""
    return f"{job}-{role}"


def own_name(job: str, uid: str) -> str:
    """Return the name of a job's Secret and account, distinct from those of earlier jobs of its name.

    An earlier job's objects may still exist and may disappear at any time.
    """
    return f"{master_name(job)}-{uid.partition('-')[0]}"


def labels(job: str, role: str = "") -> dict[str, str]:
    """Return the labels of a job's object, including the common Kubernetes labels."""
    own = {
        JOB_LABEL: job,
        "app.kubernetes.io/name": "dlrover",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/managed-by": "dlrover-operator",
    }
    return own | ({ROLE_LABEL: role, "app.kubernetes.io/component": role} if role else {})

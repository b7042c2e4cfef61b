"""TLS between a job's nodes and its master: what the pods receive for it. No I/O here."""

from __future__ import annotations

from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.types import ElasticJob, Manifest

AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
"""Keys of the Secret, the same as in every Secret of type ``kubernetes.io/tls``."""
FOLDER = "/var/run/dlrover/tls"
"""Directory of these files in pods."""
VOLUME = "dlrover-tls"


def secret_name(job: ElasticJob) -> str:
    """Return the name of the Secret with a job's certificate."""
    return f"{names.own_name(job.name, str(job.metadata.get('uid', '')))}-tls"


def hosts(job: ElasticJob) -> list[str]:
    """Return the hosts in the master's certificate; the first is the name that all clients expect."""
    service = names.master_name(job.name)
    where = f"{service}.{job.namespace}"
    return [service, where, f"{where}.svc", "localhost", "127.0.0.1", "::1"]


def give_master(pod: Manifest, container: Manifest, job: ElasticJob) -> None:
    """Give a master's container the certificate and its key if the job uses TLS."""
    variables = {
        "DLROVER_TLS_CERT": f"{FOLDER}/{CERTIFICATE}",
        "DLROVER_TLS_KEY": f"{FOLDER}/{KEY}",
    }
    _give(pod, container, job, [CERTIFICATE, KEY, AUTHORITY], variables)


def give_node(pod: Manifest, container: Manifest, job: ElasticJob) -> None:
    """Give a node's container the authority to verify the master with if the job uses TLS."""
    _give(pod, container, job, [AUTHORITY], {})


def _give(
    pod: Manifest, container: Manifest, job: ElasticJob, keys: list[str], variables: dict[str, str]
) -> None:
    if not job.spec.master.tls:
        return
    items = [{"key": key, "path": key} for key in keys]
    volume = {"name": VOLUME, "secret": {"secretName": secret_name(job), "items": items}}
    pod["volumes"] = [*(pod.get("volumes") or []), volume]
    mount = {"name": VOLUME, "mountPath": FOLDER, "readOnly": True}
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
    variables = {
        **variables,
        "DLROVER_TLS_CA": f"{FOLDER}/{AUTHORITY}",
        "DLROVER_TLS_SERVER_NAME": hosts(job)[0],
    }
    given = [one for one in container.get("env") or [] if one["name"] not in variables]
    container["env"] = [*({"name": n, "value": v} for n, v in variables.items()), *given]

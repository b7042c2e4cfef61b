"""``dlrover submit``: check an ElasticJob's manifest, preview its objects, or create it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from dlrover import config, extras
from dlrover.cli.cluster.kube import IMAGE, Kubeconfig, MasterImage, extra
from dlrover.cli.output import Form, Output
from dlrover.errors import ConfigurationError, kind_of

Manifest = dict[str, Any]
LATER = "(set in the cluster)"
"""Placeholder for the job's token and its certificate."""
UID = "UID"
"""Placeholder for the job's uid; names contain its part before the first hyphen."""


def submit(  # noqa: PLR0913 - each is an option of the command
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Manifest of an ElasticJob (YAML); - for stdin.")
    ],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the objects without creating them; needs no cluster."
        ),
    ] = False,
    namespace: Annotated[str, typer.Option(help="Namespace for a manifest without one.")] = "",
    kubeconfig: Kubeconfig = "",
    master_image: MasterImage = IMAGE,
    platform: Annotated[
        str, typer.Option(help="kubernetes, or ray for the same job on a Ray cluster.")
    ] = "kubernetes",
    ray_address: Annotated[
        str, typer.Option(help="The Ray cluster, as for dlrover-run; by default RAY_ADDRESS.")
    ] = "",
    output: Output = Form.TEXT,
) -> None:
    """Create an ElasticJob; with --dry-run, print it and the objects that the operator would create."""
    _check_platform(platform, ray_address)
    with extra() if platform == "kubernetes" else extras.needed("--platform ray", "ray"):
        if platform == "kubernetes":
            import httpx2  # noqa: F401, PLC0415 - needs the extra
        import yaml  # noqa: F401, PLC0415

    from dlrover.cli.cluster import launches  # noqa: PLC0415 - needs yaml
    from dlrover.kubernetes.resources import compatibility, validation  # noqa: PLC0415

    manifest = read(file)
    try:
        job = validation.parse(manifest)
    except ConfigurationError as error:
        if not dry_run:
            raise
        print(f"dlrover: {error}", file=sys.stderr)
    else:
        launches.check(job)
    for note in compatibility.notes(manifest["spec"]):
        print(f"dlrover: {note}", file=sys.stderr)
    if namespace:
        manifest["metadata"].setdefault("namespace", namespace)
    if dry_run:
        _show(preview(manifest, master_image), output)
        return
    if platform == "ray":
        from dlrover.cli.cluster import onray  # noqa: PLC0415 - an extra

        made = onray.submit(manifest, ray_address, config.environ())
        _tell(output, f"Job {made} was started on the Ray cluster.", name=made)
        return
    create(manifest, kubeconfig, output)


def create(manifest: Manifest, kubeconfig: str, output: Form, *, dry_run: bool = False) -> None:
    """Create an ElasticJob and say so, or only print it.

    Raises:
        ConfigurationError: the cluster does not take it.
        InfrastructureError: the cluster does not answer.
    """
    if dry_run:
        _show([manifest], output)
        return
    created = asyncio.run(_create(manifest, kubeconfig))["metadata"]
    name, where = created["name"], created["namespace"]
    sentence = f"ElasticJob {name} was created in namespace {where}."
    _tell(output, sentence, name=name, namespace=where)


def _check_platform(platform: str, ray_address: str) -> None:
    if platform not in ("kubernetes", "ray"):
        raise ConfigurationError(f"--platform {platform}: must be kubernetes or ray.")
    if ray_address and platform != "ray":
        raise ConfigurationError(f"--ray-address {ray_address}: needs --platform ray.")


def _tell(output: Form, sentence: str, **facts: str) -> None:
    print(msgspec.json.encode(facts).decode() if output is Form.JSON else sentence)


def read(file: str) -> Manifest:
    """Return the one manifest in a file.

    Raises:
        ConfigurationError: the file cannot be read, or is not one valid ElasticJob: all faults, one a line.
    """
    import yaml  # noqa: PLC0415 - needs the extra

    from dlrover.kubernetes.resources import names, validation  # noqa: PLC0415

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        found = [document for document in yaml.safe_load_all(text) if document is not None]
    except OSError as error:
        raise kind_of(error)(f"{file} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{file} is not valid YAML: {error}.") from error
    if len(found) != 1:
        raise ConfigurationError(
            f"{file} has {len(found)} manifests: accepted is one, of an ElasticJob."
        )
    manifest: Manifest = found[0] if isinstance(found[0], dict) else {}
    for field, wanted in (("apiVersion", names.API_VERSION), ("kind", "ElasticJob")):
        if manifest.get(field) != wanted:
            raise ConfigurationError(f"{field} is {manifest.get(field)}: accepted is {wanted}.")
    faults = validation.faults(manifest, strict=True)
    if faults:
        raise ConfigurationError("\n".join(faults))
    return manifest


def preview(manifest: Manifest, image: str) -> list[Manifest]:
    """Return the job and the objects that the operator creates for it, in order of creation."""
    from dlrover.kubernetes.machine import tls  # noqa: PLC0415
    from dlrover.kubernetes.machine.decisions import Observed  # noqa: PLC0415
    from dlrover.kubernetes.machine.reconcile import reconcile  # noqa: PLC0415

    metadata: Mapping[str, Any] = {"namespace": "default", "uid": UID, "generation": 1}
    known = {**manifest, "metadata": {**metadata, **manifest["metadata"]}}
    decision = reconcile(Observed(known), 0.0, image, LATER)
    wanted, started = decision.certificate, () if decision.start is None else (decision.start,)
    content = dict.fromkeys((tls.AUTHORITY, tls.CERTIFICATE, tls.KEY), LATER)
    secret = () if wanted is None else ({**wanted.secret, "stringData": content},)
    return [manifest, *decision.ensure, *secret, *started]


def _show(made: list[Manifest], output: Form) -> None:
    import yaml  # noqa: PLC0415 - needs the extra

    if output is Form.JSON:
        print(msgspec.json.format(msgspec.json.encode(made)).decode())
    else:
        print(yaml.safe_dump_all(made, sort_keys=False, width=100), end="")


async def _create(manifest: Manifest, kubeconfig: str) -> Manifest:
    from dlrover.kubernetes.api.client import (  # noqa: PLC0415 - needs the extra
        ELASTIC_JOBS,
        ApiError,
        Client,
    )

    async with Client.from_config(kubeconfig) as client:
        where = manifest["metadata"].setdefault("namespace", client.namespace)
        try:
            return await client.create(ELASTIC_JOBS, manifest)
        except ApiError as error:
            known = {
                409: f"metadata.name is {manifest['metadata']['name']}: namespace {where} already has an ElasticJob of "
                "this name.",
                404: f"The cluster has no namespace {where}, or no ElasticJobs: apply deploy/crds first.",
                422: error.message,
            }
            if error.status not in known:
                raise
            raise ConfigurationError(known[error.status]) from error

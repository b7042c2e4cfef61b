"""The resources ``ElasticJob`` and ``ScalePlan`` (``elastic.iml.github.io/v1alpha1``).

The only source of their fields: the schemas of `dlrover.kubernetes.resources.crd`, the checks of
`dlrover.kubernetes.resources.validation` and the documentation are derived from it. Times are in seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

Manifest: TypeAlias = dict[str, Any]
"""A Kubernetes object, as in its manifest."""

Role = Literal["worker", "ps", "chief", "evaluator", "dlrover-master"]
Strategy = Literal["AllreduceStrategy", "ParameterServerStrategy", "CustomStrategy", "Local"]
OptimizeMode = Literal["manual", "single-job", "cluster", "manunal", "mannual"]
"""The last two are misspellings of ``manual`` in the original."""
CleanPodPolicy = Literal["None", "Running", "All"]
RestartPolicy = Literal["", "Always", "OnFailure", "Never", "ExitCode"]
GangBy = Literal["", "volcano", "coscheduling", "koordinator", "kueue"]
Phase = Literal[
    "Created",
    "Pending",
    "Running",
    "Restarting",
    "Suspended",
    "Yielded",
    "Succeeded",
    "Failed",
    "Rejected",
]

QUANTITY = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?"
"""Regular expression for a complete quantity in a string."""
_QUANTITY = {"x-kubernetes-int-or-string": True, "minimum": 0, "pattern": f"^({QUANTITY})$"}
Quantity: TypeAlias = Annotated[
    int | str,
    Meta(extra_json_schema=_QUANTITY),
]


def _kept(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that keeps all fields but checks only some."""
    kept = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return kept | ({"properties": properties} if properties else {})


def _list(items: dict[str, Any], most: int | None = None) -> dict[str, Any]:
    """Return the schema of a list. Lists that CEL rules traverse need the bound ``most``."""
    return {"type": "array", "items": items} | ({"maxItems": most} if most else {})


_STRING = {"type": "string"}
_STRINGS = {"type": "object", "additionalProperties": _STRING}
_RESOURCES = _kept(requests=_kept(memory=_QUANTITY), limits=_kept(memory=_QUANTITY))
_MAY_BE_NULL = {"nullable": True}
_ENV = _kept(
    name=_STRING | {"minLength": 1}, value=_STRING | _MAY_BE_NULL, valueFrom=_kept() | _MAY_BE_NULL
)
_CONTAINER = _kept(
    name=_STRING | {"maxLength": 63},
    image=_STRING,
    command=_list(_STRING),
    args=_list(_STRING),
    env=_list(_ENV | {"required": ["name"]}),
    ports=_list(_kept()),
    volumeMounts=_list(_kept()),
    resources=_RESOURCES,
)
_AFFINITY = _kept(
    nodeAffinity=_kept(
        requiredDuringSchedulingIgnoredDuringExecution=_kept(
            nodeSelectorTerms=_list(_kept(matchExpressions=_list(_kept())))
        )
    ),
    podAntiAffinity=_kept(preferredDuringSchedulingIgnoredDuringExecution=_list(_kept())),
)
PodTemplate: TypeAlias = Annotated[
    dict[str, Any],
    Meta(
        description="Pod template; missing fields get defaults.",
        extra_json_schema=_kept(
            metadata=_kept(labels=_STRINGS, annotations=_STRINGS),
            spec=_kept(
                containers=_list(_CONTAINER, most=64),
                initContainers=_list(_kept(resources=_RESOURCES)) | _MAY_BE_NULL,
                volumes=_list(_kept()),
                affinity=_AFFINITY,
            ),
        ),
    ),
]

RoleOptions: TypeAlias = Annotated[
    dict[str, Any],
    Meta(
        description="Options of a role, as in a YAML file of dlrover roles.",
        extra_json_schema=_kept(),
    ),
]


class _Base(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of the resources, with field names in camel case."""


class EnvVar(_Base, frozen=True):
    """An environment variable of every node's pod, as in a container."""

    name: Annotated[str, Meta(min_length=1, description="Name of the variable.")]
    value: Annotated[str, Meta(description="Value of the variable.")] = ""
    value_from: Annotated[
        dict[str, Any] | None,
        Meta(
            description="Source of the value, as in a container.",
            extra_json_schema={"x-kubernetes-preserve-unknown-fields": True},
        ),
    ] = None


class ReplicaSpec(_Base, frozen=True):
    """The pods of one role."""

    replicas: Annotated[
        int, Meta(ge=0, le=100_000, description="Pods of this role; for workers, nodes of the job.")
    ] = 1
    min_replicas: (
        Annotated[
            int,
            Meta(ge=1, le=100_000, description="Minimum for the job to run; replicas if unset."),
        ]
        | None
    ) = None
    template: PodTemplate = {}
    restart_count: Annotated[
        int, Meta(ge=0, le=10_000, description="Restarts after failures of the program.")
    ] = 3
    priority: Annotated[
        str,
        Meta(
            pattern=r"^(|high|low|0?\.[0-9]+|1(\.0+)?)$",
            description="high, low, or the fraction of the pods with high priority, as 0.5.",
        ),
    ] = ""
    restart_policy: Annotated[
        RestartPolicy, Meta(description="Accepted for compatibility; the master replaces pods.")
    ] = ""
    auto_scale: Annotated[
        bool,
        Meta(
            description="For workers: scale their number between minReplicas and replicas during training."
        ),
    ] = False
    restart_timeout: Annotated[
        int, Meta(ge=0, description="Accepted for compatibility; see the setting join_timeout.")
    ] = 0
    batch_scheduler: Annotated[
        str, Meta(description="Accepted for compatibility; set schedulerName in the template.")
    ] = msgspec.field(default="", name="BatchScheduler")


class MasterSpec(_Base, frozen=True):
    """The job's master."""

    image: Annotated[str, Meta(description="Image; the operator's --master-image if unset.")] = ""
    journal_claim: Annotated[
        str,
        Meta(
            description="PersistentVolumeClaim that keeps the job's directory across restarts of the master."
        ),
    ] = ""
    tls: Annotated[
        bool,
        Meta(description="Encrypt connections to the master with TLS, with a certificate per job."),
    ] = False


class GangSpec(_Base, frozen=True):
    """All-or-nothing placement of at least the job's minimum of nodes."""

    by: Annotated[
        GangBy,
        Meta(
            description="Scheduler that places the nodes together; their pods join its pod group."
        ),
    ] = ""
    queue: Annotated[
        str, Meta(max_length=63, description="Queue of Volcano, or LocalQueue of Kueue.")
    ] = ""
    yield_after_seconds: (
        Annotated[
            int,
            Meta(
                ge=10,
                description="Seconds without the minimum of nodes before the job yields to another one.",
            ),
        ]
        | None
    ) = None


class SparesSpec(_Base, frozen=True):
    """Warm pods beside the workers. Each takes the place of a lost worker at once."""

    replicas: Annotated[int, Meta(ge=0, le=1000, description="Number of spare pods.")] = 0
    auto: Annotated[
        bool,
        Meta(description="Choose the number from measured failures and the time to replace a pod."),
    ] = False
    priority_class_name: Annotated[
        str,
        Meta(
            max_length=253,
            description="PriorityClass of the spare pods; that of the workers if unset.",
        ),
    ] = ""


class ElasticJobSpec(_Base, frozen=True):
    """The specification of the job."""

    replica_specs: Annotated[
        dict[str, ReplicaSpec],
        Meta(min_length=1, max_length=5, description="Pods by role: worker, ps, chief, evaluator."),
    ]
    roles: Annotated[
        dict[str, RoleOptions],
        Meta(
            max_length=64,
            description="Roles of a job of several, each with the options of dlrover roles; dlrover-master is "
            "their coordinator.",
        ),
    ] = {}
    distribution_strategy: Annotated[
        Strategy, Meta(description="How the workers train together.")
    ] = "AllreduceStrategy"
    optimize_mode: Annotated[
        OptimizeMode, Meta(description="manual: keep the number of workers despite autoScale.")
    ] = "single-job"
    suspend: Annotated[
        bool, Meta(description="Remove the job's pods while true; Kueue sets it.")
    ] = False
    ttl_seconds_after_finished: (
        Annotated[int, Meta(ge=0, description="Seconds after its end until the job is deleted.")]
        | None
    ) = None
    active_deadline_seconds: (
        Annotated[int, Meta(ge=1, description="Seconds of activity after which the job fails.")]
        | None
    ) = None
    clean_pod_policy: Annotated[
        CleanPodPolicy, Meta(description="Pods to delete once the job has ended.")
    ] = "Running"
    managed_by: Annotated[
        str,
        Meta(
            max_length=63,
            description="Name of another controller; this operator then ignores the job.",
        ),
    ] = ""
    master: Annotated[MasterSpec, Meta(description="The job's master.")] = MasterSpec()
    gang: Annotated[GangSpec, Meta(description="All-or-nothing placement of the nodes.")] = (
        GangSpec()
    )
    spares: Annotated[
        SparesSpec, Meta(description="Warm pods. Each replaces a lost worker at once.")
    ] = SparesSpec()
    envs: Annotated[
        dict[str, EnvVar],
        Meta(max_length=256, description="Variables of every node's pod, under any keys."),
    ] = {}
    resource_limits: Annotated[
        dict[str, Quantity], Meta(description="Accepted for compatibility; use a ResourceQuota.")
    ] = {}
    brain_service: Annotated[str, Meta(description="Address of the Brain, HOST:PORT.")] = ""
    enable_elastic_scheduling: Annotated[
        bool, Meta(description="Accepted for compatibility; jobs are always elastic.")
    ] = False
    enable_dynamic_sharding: Annotated[
        bool, Meta(description="Accepted for compatibility; the program decides.")
    ] = False
    relaunch_strategy: Annotated[str, Meta(description="Accepted for compatibility.")] = ""
    critical_nodes: Annotated[str, Meta(description="Accepted for compatibility.")] = ""


class Condition(_Base, frozen=True):
    """One fact about an object, with the time and reason of its last change (``metav1.Condition``)."""

    type: Annotated[str, Meta(description="Name of the condition.")]
    status: Annotated[
        Literal["True", "False", "Unknown"], Meta(description="Whether the condition holds.")
    ]
    reason: Annotated[str, Meta(description="Reason in one word.")]
    message: Annotated[str, Meta(description="Reason in a sentence.")] = ""
    last_transition_time: Annotated[
        str,
        Meta(
            description="Time of the last change of status.",
            extra_json_schema={"format": "date-time"},
        ),
    ] = ""
    observed_generation: Annotated[
        int, Meta(description="Generation of the object that the condition describes.")
    ] = 0


class ReplicaStatus(_Base, frozen=True):
    """Numbers of pods of one role by phase."""

    pending: int = 0
    active: int = 0
    succeeded: int = 0
    failed: int = 0


class MasterStatus(_Base, frozen=True):
    """The operator's record of the job's master."""

    starts: Annotated[int, Meta(description="Number of master pods started.")] = 0
    last_start_time: Annotated[str, Meta(description="Start time of the last one.")] = ""
    quick_ends: Annotated[
        int,
        Meta(
            description="Consecutive masters that ended within a minute, or by an unexpected error within an hour."
        ),
    ] = 0
    failed: Annotated[
        bool, Meta(description="Whether the last one ended by an unexpected error.")
    ] = False
    memory_factor: Annotated[
        float,
        Meta(
            description="Memory multiplier relative to the first master, which ran out of memory."
        ),
    ] = 1.0


class TrainingStatus(_Base, frozen=True):
    """The training's progress, written by the job's master."""

    steps: Annotated[int, Meta(description="Optimizer steps, including repeated ones.")] = 0
    restarts: Annotated[int, Meta(description="Restarts of the workers.")] = 0
    goodput: Annotated[
        str, Meta(description="Share of the time spent on new steps, such as 97.5%.")
    ] = ""
    eta: Annotated[str, Meta(description="Estimated time left, such as 3h12m.")] = ""
    waits: Annotated[
        str, Meta(description="Why a node's pod cannot be created; empty if none.")
    ] = ""


class ElasticJobStatus(_Base, frozen=True):
    """The state of the job. The operator writes everything except ``training``."""

    phase: Annotated[str, Meta(description="State in one word.")] = ""
    message: Annotated[str, Meta(description="State in a sentence.")] = ""
    observed_generation: Annotated[
        int, Meta(description="Generation that the status describes.")
    ] = 0
    conditions: Annotated[
        list[Condition],
        Meta(
            description="Accepted, Applied, Suspended, Placed, MasterReady, Running, Complete, "
            "Succeeded, Failed.",
            extra_json_schema={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        ),
    ] = []
    workers: Annotated[str, Meta(description="Running / wanted workers.")] = ""
    replicas: Annotated[int, Meta(description="Worker pods, for the scale subresource.")] = 0
    selector: Annotated[str, Meta(description="Label selector of the worker pods.")] = ""
    replica_statuses: Annotated[
        dict[str, ReplicaStatus], Meta(description="Pods by role and phase.")
    ] = {}
    start_time: Annotated[
        str, Meta(description="Time of the job's start, or of its last resumption.")
    ] = ""
    completion_time: Annotated[str, Meta(description="Time of the job's end.")] = ""
    master: Annotated[MasterStatus, Meta(description="Record of the job's masters.")] = (
        MasterStatus()
    )
    yields: Annotated[
        int, Meta(description="Number of times that the job yielded to another one.")
    ] = 0
    last_yield_time: Annotated[str, Meta(description="Time of the last yield.")] = ""
    running_spec: Annotated[
        str, Meta(description="Spec that the job started with and its pods are created from; JSON.")
    ] = ""
    job_uid: Annotated[str, Meta(description="Uid of the job that the status describes.")] = ""
    training: Annotated[TrainingStatus, Meta(description="Progress of the training.")] = (
        TrainingStatus()
    )


class ScaleReplica(_Base, frozen=True):
    """The wanted pods of a role."""

    replicas: (
        Annotated[
            int, Meta(ge=0, le=100_000, description="Wanted number of pods; unchanged if unset.")
        ]
        | None
    ) = None
    resource: Annotated[
        dict[str, Quantity],
        Meta(description="cpu and memory of its pods; pods of another size are replaced."),
    ] = {}


class PlannedPod(_Base, frozen=True):
    """A pod named in a plan."""

    name: Annotated[str, Meta(description="Name of the pod.")] = ""
    id: Annotated[int, Meta(ge=0, description="Accepted for compatibility.")] = 0
    type: Annotated[str, Meta(description="Role; worker if unset.")] = ""
    rank_index: Annotated[int, Meta(ge=0, description="Accepted for compatibility.")] = 0
    service: Annotated[str, Meta(description="Accepted for compatibility.")] = ""
    resource: Annotated[
        dict[str, Quantity],
        Meta(description="In migratePods: cpu and memory of the replacement."),
    ] = {}


class ScalePlanSpec(_Base, frozen=True):
    """A change to the number or size of a running job's workers or servers (role ps)."""

    owner_job: Annotated[str, Meta(min_length=1, description="Name of the ElasticJob.")]
    replica_resource_specs: Annotated[
        dict[str, ScaleReplica], Meta(description="Wanted pods by role.")
    ] = {}
    create_pods: Annotated[
        list[PlannedPod],
        Meta(description="Pods to add, one per entry; the master names them."),
    ] = []
    remove_pods: Annotated[
        list[PlannedPod],
        Meta(description="Pods to remove, one per entry; those with the highest ranks leave."),
    ] = []
    migrate_pods: Annotated[
        list[PlannedPod],
        Meta(description="Pods to replace; each trains until its replacement is ready."),
    ] = []
    ps_hosts: Annotated[list[str], Meta(description="Accepted for compatibility.")] = []
    manual_scaling: Annotated[
        bool, Meta(description="Accepted for compatibility; see the label scale-type.")
    ] = False
    reason: Annotated[
        str, Meta(max_length=400, description="Reason, shown in the job's events.")
    ] = ""


class ScalePlanStatus(_Base, frozen=True):
    """The progress and result of the plan."""

    phase: Annotated[str, Meta(description="Pending, Scaling, Succeeded or Failed.")] = ""
    message: Annotated[str, Meta(description="State in a sentence.")] = ""
    replicas: (
        Annotated[int, Meta(description="Number of workers that the plan requests.")] | None
    ) = None
    servers: (
        Annotated[int, Meta(description="Number of ps pods that the plan requests.")] | None
    ) = None
    create_time: Annotated[
        str, Meta(description="Time when the job's master started the plan.")
    ] = ""
    finish_time: Annotated[str, Meta(description="Time when the plan succeeded or failed.")] = ""


class ElasticJob(_Base, frozen=True):
    """An elastic, fault-tolerant training job."""

    metadata: dict[str, Any]
    spec: ElasticJobSpec
    status: ElasticJobStatus = ElasticJobStatus()

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.metadata["name"])

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return str(self.metadata.get("namespace", "default"))

    @property
    def uid(self) -> str:
        """The job's unique id, not shared by other jobs of its name; empty before the server assigns it."""
        return str(self.metadata.get("uid", ""))


class ScalePlan(_Base, frozen=True):
    """A change to the pods of a running ElasticJob."""

    metadata: dict[str, Any]
    spec: ScalePlanSpec
    status: ScalePlanStatus = ScalePlanStatus()

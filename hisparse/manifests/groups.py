"""Groups of workers: a LeaderWorkerSet for each kind, whose replicas are the groups.

    pod          one machine's ranks of a group in one container, since GPUs reach each other's memory within one;
                 a host pool of its own in /dev/shm. To the coordinator it is a node
    group        `pods` pods; rank = pod's index * GPUs + GPU. Across pods the ranks meet at the leader
    names        of a pod, as LeaderWorkerSet gives them (NAME-0, NAME-0-1): the same after a restart

When a rank ends, the other ranks of its group end by themselves, each container with them, and the kubelet starts the
containers again in the same pods. So restartPolicy is None: the rows in the host pools of those pods are kept.

End of a pod. preStop drains the group: running requests may go on for `drain_s`. Then SIGTERM withdraws the rest, and
the processes unpin the pool. The grace is longer than both together: a process that is killed while it unpins a large
pool can wedge its node (docs/known-bugs.md).

Rejected: a pod for each rank (each would have its own pool, and NCCL no access to the neighbour's memory);
RecreateGroupOnPodRestart (new pods have empty pools: all requests would be prefilled again); emptyDir volumes of medium
HugePages for the pool (hugetlbfs has no write(2), with which its header is made, and reserves pages for ever;
transparent huge pages of tmpfs are taken instead).
"""

from __future__ import annotations

from typing import Final

from hisparse.manifests.environments import check_settings
from hisparse.manifests.pods import (
    ADMIN_PORT,
    GROUP_PORT,
    KEYS_DIR,
    METRICS_PORT,
    WORKER_PORT,
    Document,
    container,
    disruption_budget,
    metadata,
    pod,
    quantity,
    resources,
    service,
    worker_ports,
)
from hisparse.manifests.processes import CACHE, COMMON
from hisparse.manifests.values import ManifestValues, WorkersValues, size_bytes
from hisparse.manifests.yaml_text import Node

MODEL_DIR: Final = "/model"
#: Beside the pool in /dev/shm: its header, and the shared memory of NCCL where there are several ranks.
SHM_BYTES: Final = 1 << 30
NCCL_BYTES: Final = 4 << 30
GROUP_INDEX_LABEL: Final = "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"
#: The command of a drain goes on a little after its deadline.
DRAIN_MARGIN_S: Final = 30

#: One rank after another is started; when one ends, all do. SIGKILL ends those that hang. `wait` returns at a signal.
RANKS: Final = """\
group=$$ ranks=
trap 'trap "" TERM USR1; kill -TERM 0; wait; exit 0' TERM
trap 'trap "" USR1; (sleep 20; kill -KILL 0) & wait $ranks; exit 71' USR1
for gpu in {gpus}; do
  (
    trap : TERM
    export HISPARSE_WORKER_NAME="$POD_NAME-$gpu" HISPARSE_WORKER_DEVICE="cuda:$gpu"
    export HISPARSE_WORKER_GROUP_RANK="$((LWS_WORKER_INDEX * {count} + gpu))"
    export HISPARSE_WORKER_METRICS_PORT="$(({port} + gpu))"
{meet}    hisparse worker
    kill -USR1 "$group"
  ) &
  ranks="$ranks $!"
done
wait
"""
#: Rank 0 listens at an address of its own machine; the others look the leader up.
MEET: Final = """\
    if [ "$LWS_WORKER_INDEX" -eq 0 ]; then leader=$POD_IP; else leader=$LWS_LEADER_ADDRESS; fi
    export HISPARSE_WORKER_GROUP_ENDPOINT="tcp://$leader:{port}"
"""


def script(workers: WorkersValues) -> str:
    """What the container of a group's pod runs, by sh."""
    meet = MEET.format(port=GROUP_PORT) if workers.pods > 1 else ""
    gpus = " ".join(map(str, range(workers.gpus)))
    return RANKS.format(gpus=gpus, count=workers.gpus, port=METRICS_PORT, meet=meet)


def worker_environ(values: ManifestValues, workers: WorkersValues) -> dict[str, str]:
    """Of a worker, or what the ranks of a pod have in common. Raises ConfigError for what a worker would refuse."""
    coordinator = f"tcp://{values.name}-coordinator"
    fixed = COMMON | {
        "HISPARSE_CLUSTER_WORKER_ENDPOINT": f"{coordinator}:{WORKER_PORT}",
        "HISPARSE_CLUSTER_ADMIN_ENDPOINT": f"{coordinator}:{ADMIN_PORT}",  # of preStop
        "HISPARSE_CLUSTER_SPEAK_AS": "admin",
        "HISPARSE_WORKER_NAME": "$(POD_NAME)",
        "HISPARSE_WORKER_NODE": "$(POD_NAME)",
        "HISPARSE_WORKER_ROLE": workers.role,
        "HISPARSE_WORKER_MODEL": MODEL_DIR,
        "HISPARSE_WORKER_SERVED_MODEL_NAME": values.model.name,
        "HISPARSE_WORKER_POOL_DIR": "/dev/shm/hisparse",
        "HISPARSE_WORKER_HOST_MEM": workers.host_mem,
        "HISPARSE_WORKER_METRICS_HOST": "0.0.0.0",
        "HISPARSE_WORKER_METRICS_PORT": str(METRICS_PORT),
    }
    if workers.ranks > 1:
        fixed["HISPARSE_WORKER_GROUP"] = f"{values.name}-{workers.name}-$(GROUP_INDEX)"
        fixed["HISPARSE_WORKER_GROUP_SIZE"] = str(workers.ranks)
    if workers.pods > 1:
        fixed["HISPARSE_WORKER_GROUP_SECRET_FILE"] = f"{KEYS_DIR}/group.secret"
    settings = {"device": "cuda", "device_mem": "auto"} | workers.settings
    if settings.get("transfer"):
        fixed["HISPARSE_WORKER_TRANSFER_ADDRESS"] = "tcp://$(POD_IP):0"
    return check_settings("worker", settings, fixed, f"settings of workers {workers.name}")


def group_set(values: ManifestValues, workers: WorkersValues) -> list[Document]:
    """LeaderWorkerSet, Service of its metrics and PodDisruptionBudget. Raises ConfigError."""
    component = workers.name
    template = pod(
        values,
        component,
        _process(values, workers),
        _volumes(values, workers),
        f"{values.name}-worker",
        grace_s=workers.drain_s + DRAIN_MARGIN_S + workers.stop_s,
        node_selector=workers.node_selector,
    )
    found: Document = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(values, component),
        "spec": {
            **({} if workers.scaling else {"replicas": workers.groups}),  # the autoscaler's, where there is one
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
            },
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": workers.pods,
                "restartPolicy": "None",
                "workerTemplate": template,
            },
        },
    }
    metrics = service(
        values,
        component,
        worker_ports(workers),
        job="hisparse-worker",
        suffix="-metrics",
        headless=True,
        unready=True,
    )
    return [found, metrics, disruption_budget(values, component)]


def _process(values: ManifestValues, workers: WorkersValues) -> Document:
    host_bytes = size_bytes(workers.host_mem, "workers.host_mem")
    huge_bytes = size_bytes(workers.hugepages, "workers.hugepages") if workers.hugepages else 0
    drained = "$HISPARSE_WORKER_GROUP" if workers.ranks > 1 else "$HISPARSE_WORKER_NAME"
    drain = f'hisparse drain "{drained}" --deadline {workers.drain_s} --wait'
    return container(
        "worker",
        values.images.worker,
        ["sh", "-uc", script(workers)] if workers.ranks > 1 else ["hisparse", "worker"],
        worker_environ(values, workers),
        {"shm": "/dev/shm", "model": MODEL_DIR, "cache": CACHE},
        resources(workers.cpus, host_bytes + size_bytes(workers.memory, "workers.memory"), workers.gpus, huge_bytes),
        worker_ports(workers),
        start_s=workers.start_s,
        pre_stop=["sh", "-uc", f"exec timeout {workers.drain_s + DRAIN_MARGIN_S} {drain}"],
        from_pod={"GROUP_INDEX": GROUP_INDEX_LABEL} if workers.ranks > 1 else {},
        sub_paths={"model": values.model.path},
    )


def _volumes(values: ManifestValues, workers: WorkersValues) -> list[Node]:
    pool_bytes = size_bytes(workers.host_mem, "workers.host_mem") + SHM_BYTES
    pool_bytes += NCCL_BYTES if workers.ranks > 1 else 0
    return [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(pool_bytes)}},
        {"name": "model", "persistentVolumeClaim": {"claimName": values.model.claim, "readOnly": True}},
        {"name": "cache", "emptyDir": {"sizeLimit": "4Gi"}},
    ]

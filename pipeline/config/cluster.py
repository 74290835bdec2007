"""Keys that place a run: the components of its job, timeouts, requeueing, node checks and the network."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.config.sbatch import Options
from pipeline.recipe.values import Bool, Check, Float, Line, NotNegative, Positive, Variables, Word

COLOCATED = "policy.generation.colocated.enabled"
AUDIT_AUTO, AUDIT_NONE = "auto", "none"


def _audit_error(value: str) -> str | None:
    """Return a message if a value of `cluster.audit` is wrong, else None. Paths such as ./X and ~/X are already absolute."""
    if value in (AUDIT_AUTO, AUDIT_NONE) or value.startswith("/"):
        return None
    return f"got {value}; expected {AUDIT_AUTO}, {AUDIT_NONE}, or a path that begins with /, ./, ../ or ~"


Seconds = Annotated[Float, Field(ge=1e-3)]
Bandwidth = Annotated[Float, Field(ge=1e-3)]


@dataclass
class TimeoutsConfig:
    """Timeouts in seconds. One that expires ends the run and names the call, the phase and the ranks."""

    join: Annotated[Seconds, Field(description="Waiting for all ranks to join the world.")] = 600.0
    silence: Annotated[
        Seconds, Field(description="Time without a heartbeat from a rank. Ten times as long while ranks load.")
    ] = 60.0
    setup: Annotated[Seconds, Field(description="Loading models and creating process groups.")] = 3600.0
    rollout: Annotated[Seconds, Field(description="Sampling the answers of one step.")] = 7200.0
    train: Annotated[Seconds, Field(description="Training in one step.")] = 7200.0
    refit: Annotated[Seconds, Field(description="Moving weights to the engines.")] = 1800.0
    save: Annotated[
        Seconds,
        Field(
            description="Saving a checkpoint. Before, rank 0 waits up to the same time for rollouts that are still being"
            " written."
        ),
    ] = 3600.0
    storage: Annotated[
        Seconds | None,
        Field(
            description="Waiting while the run folder's disk is full, read-only or unreachable. Failed"
            " writes of rollouts and TensorBoard never end a run. null: 600, or half of save if that is less."
        ),
    ] = None


@dataclass
class ComponentConfig:
    """The ranks of one component of the heterogeneous job.

    The executor `local` reads only nodes, gpus_per_node, ranks_per_node and env_vars; the plan also reads gpu and
    gpu_memory_gb.
    """

    nodes: Annotated[Positive, Field(le=1 << 16, description="Number of nodes.")] = 1
    gpus_per_node: Annotated[NotNegative, Field(le=1024, description="GPUs on each node.")] = 0
    gpu: Annotated[
        Line,
        Field(
            description="The GPU model: a file in recipes/hardware/, without .yaml, or a path to one. The plan uses it."
            " Its compute_capability decides whether flash_attention=3 is possible, and the value of"
            " CUDA_DEVICE_MAX_CONNECTIONS for Megatron-Core."
        ),
    ] = "h100"
    gpu_memory_gb: Annotated[
        Float | None,
        Field(ge=1, description="Memory of one GPU, in units of 10^9 bytes. null: the value in the description of `gpu`."),
    ] = None
    ranks_per_node: Annotated[
        Positive | None, Field(le=1024, description="Ranks on each node. null: one per GPU, or 1 without GPUs.")
    ] = None
    cpus_per_task: Annotated[
        Positive | None,
        Field(
            description="CPUs of one rank. null: ranks with GPUs share all of the job's CPUs on a node; other ranks get"
            " one CPU each. OMP_NUM_THREADS is a rank's share, unless the submitting shell exports it."
        ),
    ] = None
    partition: Annotated[Word | None, Field(description="sbatch --partition.")] = None
    account: Annotated[Word | None, Field(description="sbatch --account.")] = None
    qos: Annotated[Word | None, Field(description="sbatch --qos.")] = None
    mem: Annotated[
        Line | None,
        Field(
            description="Memory of each node, as in 500G. 0: all memory. default: Slurm's default. null: 0 on whole"
            " nodes, otherwise default."
        ),
    ] = None
    constraint: Annotated[Line | None, Field(description="sbatch --constraint.")] = None
    exclusive: Annotated[
        Bool | None,
        Field(
            description="Allocate whole nodes, with all CPUs and memory. null: true with GPUs, as in NeMo-RL's ray.sub,"
            " because Slurm otherwise gives a rank one CPU and little memory. If a site forbids --exclusive"
            " or --mem, use false with cpus_per_task and mem, or mem=default."
        ),
    ] = None
    sbatch_options: Annotated[
        Options,
        Field(description="Other sbatch options for these nodes. They override cluster.sbatch_options."),
    ] = field(default_factory=dict)
    container_image: Annotated[
        Line | None,
        Field(
            description="Container image for pyxis: the path of a .sqsh file, or [USER@][REGISTRY#]IMAGE[:TAG]."
            " null: no container."
        ),
    ] = None
    container_mounts: Annotated[
        list[Line] | None,
        Field(
            description="Mounts, as SOURCE:TARGET[:FLAGS]. Submission checks that they cover all paths that the component"
            " opens."
        ),
    ] = None
    container_workdir: Annotated[Line | None, Field(description="Working directory in the container.")] = None
    container_env: Annotated[
        list[Line], Field(description="Environment variables whose value on the node overrides the image's value.")
    ] = field(default_factory=list)
    container_writable: Annotated[
        Bool | None, Field(description="Whether the container is writable. null: the site's pyxis configuration decides.")
    ] = None
    python: Annotated[
        Line | None, Field(description="Python interpreter in the container. null: the one that runs submit.py.")
    ] = None
    srun_args: Annotated[
        list[Line], Field(description="Other arguments of srun. They come after --mpi=none, and override it.")
    ] = field(default_factory=list)
    env_vars: Annotated[Variables, Field(description="Environment variables of the ranks.")] = field(default_factory=dict)


OF_NODES = {
    "nodes": 1,
    "gpu": "h100",
    "gpu_memory_gb": None,
    "partition": None,
    "account": None,
    "qos": None,
    "mem": None,
    "constraint": None,
    "exclusive": None,
}
"""Defaults of components on separate nodes. With cluster.share_nodes all components take the values of cluster.train."""
SHARED = {**OF_NODES, "gpus_per_node": 0}
"""Defaults of cluster.generate. With policy.generation.colocated.enabled it takes the values of cluster.train."""


def _of_train(key: str, apart: object, *conditions: str) -> Any:
    """Return a key's default in another component than cluster.train.

    It is an interpolation: cluster.train's value if one of the keys in `conditions` is true, else `apart`.
    """
    value = json.dumps(apart)
    for condition in conditions:
        value = f"${{if:${{{condition}}},${{cluster.train.{key}}},{value}}}"
    return value


def _generate() -> ComponentConfig:
    defaults = {key: _of_train(key, apart, "cluster.share_nodes", COLOCATED) for key, apart in OF_NODES.items()}
    return ComponentConfig(**defaults, gpus_per_node=_of_train("gpus_per_node", 0, COLOCATED))


def _reward() -> ComponentConfig:
    return ComponentConfig(**{key: _of_train(key, apart, "cluster.share_nodes") for key, apart in OF_NODES.items()})


def _of_gpu(component: str, name: str) -> Any:
    """Return a key's default: an interpolation of a number in the description of a component's GPU (`hardware.py`)."""
    return f"${{hardware:${{cluster.{component}.gpu}},{name}}}"


@dataclass
class NetworkConfig:
    """Network speeds that plan and judge refits. GB/s are 10^9 bytes per second in one direction.

    The first two default to those of cluster.train.gpu.
    """

    nic_gb_per_s: Annotated[Bandwidth, Field(description="Bandwidth of one rank to other nodes, in GB/s.")] = 50.0
    node_gb_per_s: Annotated[
        Bandwidth, Field(description="Bandwidth of one rank within its node, for example over NVLink, in GB/s.")
    ] = 450.0
    latency_us: Annotated[Float, Field(ge=0, description="Latency of one message, in microseconds.")] = 20.0
    memory_gb_per_s: Annotated[
        Bandwidth, Field(description="Rate at which a rank gathers data to send and scatters received data, in GB/s.")
    ] = 1500.0


@dataclass
class RequeueConfig:
    """Automatic restarts of a run, in the same job, from its last checkpoint."""

    enabled: Annotated[Bool, Field(description="Restart a run that ran out of time or crashed.")] = True
    max_restarts: Annotated[
        NotNegative,
        Field(
            description="Maximum restarts after crashes. A run that has saved no checkpoint since its last start is not"
            " restarted."
        ),
    ] = 3


@dataclass
class NodeChecksConfig:
    """Checks of every node before models load. The log names a node that fails, and a requeue excludes it."""

    enabled: Annotated[Bool, Field(description="Whether to check nodes.")] = True
    min_gb_per_s: Annotated[
        Float | None,
        Field(
            ge=1e-6,
            description="Minimum bandwidth between neighbors in the ring of nodes, in GB/s. null: measure and report only.",
        ),
    ] = None
    max_clock_skew_s: Annotated[Seconds, Field(description="Maximum difference between two clocks, in seconds.")] = 5.0


@dataclass
class ClusterConfig:
    """The machines of a run."""

    executor: Annotated[
        Literal["auto", "slurm", "allocation", "local"],
        Field(description="auto: the allocation that submit.py runs in, else slurm if a controller answers, else local."),
    ] = "auto"
    time_min: Annotated[
        Positive, Field(description="Time limit of one allocation, in minutes. requeue continues the run in another one.")
    ] = 240
    requeue: RequeueConfig = field(default_factory=RequeueConfig)
    node_checks: NodeChecksConfig = field(default_factory=NodeChecksConfig)
    sbatch_options: Annotated[
        Options,
        Field(
            description="Other sbatch options for the nodes of every component, as in {reservation: weekly, exclude:"
            " 'n[3-4]', contiguous: null}; null for an option without a value. Options that another key sets"
            " are refused."
        ),
    ] = field(default_factory=dict)
    audit: Annotated[
        Line,
        Check(_audit_error),
        Field(
            description="Folder of the audit log of submissions, cancellations, changes of live runs, and exports. auto: the"
            " first of these that has a log or that you may write: folders named runs above the run folder (topmost first), its"
            " parent, the run folder. none: no log. If the log cannot be written, nothing is submitted."
        ),
    ] = AUDIT_AUTO
    share_nodes: Annotated[
        Bool,
        Field(
            description="Put all components on the same nodes, each with its own GPUs. For example, of 8 GPUs per node,"
            " gpus_per_node is 4 in train and 4 in generate."
        ),
    ] = False
    train: ComponentConfig = field(default_factory=ComponentConfig)
    generate: ComponentConfig = field(default_factory=_generate)
    reward: Annotated[ComponentConfig, Field(description="Used only if an environment has served_by=reward.")] = field(
        default_factory=_reward
    )
    network: NetworkConfig = field(
        default_factory=lambda: NetworkConfig(
            nic_gb_per_s=_of_gpu("train", "nic_gb_per_s"),
            node_gb_per_s=_of_gpu("train", "nvlink_gb_per_s"),
        )
    )
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)


def ranks(component: ComponentConfig) -> int:
    """Return the number of ranks of a component."""
    return component.nodes * ranks_per_node(component)


def ranks_per_node(component: ComponentConfig) -> int:
    """Return the ranks on each node: one per GPU, or 1 without GPUs, unless the recipe sets it."""
    return component.ranks_per_node or max(1, component.gpus_per_node)

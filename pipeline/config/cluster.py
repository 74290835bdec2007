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

    join: Seconds = 600.0
    """Waiting for all ranks to join the world."""
    silence: Seconds = 60.0
    """Time without a heartbeat from a rank. Ten times as long while ranks load."""
    setup: Seconds = 3600.0
    """Loading models and creating process groups."""
    rollout: Seconds = 7200.0
    """Sampling the answers of one step."""
    train: Seconds = 7200.0
    """Training in one step."""
    refit: Seconds = 1800.0
    """Moving weights to the engines."""
    save: Seconds = 3600.0
    """Saving a checkpoint. Before, rank 0 waits up to the same time for rollouts that are still being written."""
    storage: Seconds | None = None
    """Waiting while the run folder's disk is full, read-only or unreachable. Failed writes of rollouts and TensorBoard never
    end a run. null: 600, or half of save if that is less."""


@dataclass
class ComponentConfig:
    """The ranks of one component of the heterogeneous job.

    The executor `local` reads only nodes, gpus_per_node, ranks_per_node and env_vars; the plan also reads gpu and
    gpu_memory_gb.
    """

    nodes: Annotated[Positive, Field(le=1 << 16)] = 1
    """Number of nodes."""
    gpus_per_node: Annotated[NotNegative, Field(le=1024)] = 0
    """GPUs on each node."""
    gpu: Line = "h100"
    """The GPU model: a file in recipes/hardware/, without .yaml, or a path to one. The plan uses it. Its compute_capability
    decides whether flash_attention=3 is possible, and the value of CUDA_DEVICE_MAX_CONNECTIONS for Megatron-Core."""
    gpu_memory_gb: Annotated[Float | None, Field(ge=1)] = None
    """Memory of one GPU, in units of 10^9 bytes. null: the value in the description of `gpu`."""
    ranks_per_node: Annotated[Positive | None, Field(le=1024)] = None
    """Ranks on each node. null: one per GPU, or 1 without GPUs."""
    cpus_per_task: Positive | None = None
    """CPUs of one rank. null: ranks with GPUs share all of the job's CPUs on a node; other ranks get one CPU each.
    OMP_NUM_THREADS is a rank's share, unless the submitting shell exports it."""
    partition: Word | None = None
    """sbatch --partition."""
    account: Word | None = None
    """sbatch --account."""
    qos: Word | None = None
    """sbatch --qos."""
    mem: Line | None = None
    """Memory of each node, as in 500G. 0: all memory. default: Slurm's default. null: 0 on whole nodes, otherwise default."""
    constraint: Line | None = None
    """sbatch --constraint."""
    exclusive: Bool | None = None
    """Allocate whole nodes, with all CPUs and memory. null: true with GPUs, as in NeMo-RL's ray.sub, because Slurm otherwise
    gives a rank one CPU and little memory. If a site forbids --exclusive or --mem, use false with cpus_per_task and mem, or
    mem=default."""
    sbatch_options: Options = field(default_factory=dict)
    """Other sbatch options for these nodes. They override cluster.sbatch_options."""
    container_image: Line | None = None
    """Container image. pyxis: the path of a .sqsh file, or [USER@][REGISTRY#]IMAGE[:TAG]. apptainer: the path of a .sif file or
    of a sandbox folder. null: no container."""
    container_mounts: list[Line] | None = None
    """Mounts, as SOURCE:TARGET[:FLAGS]. Submission checks that they cover all paths that the component opens."""
    container_workdir: Line | None = None
    """Working directory in the container."""
    container_args: list[Line] = field(default_factory=list)
    """Other arguments of `apptainer exec`, such as --nvccli or --writable-tmpfs. With pyxis, use srun_args."""
    python: Line | None = None
    """Python interpreter in the container. null: the one that runs submit.py."""
    srun_args: list[Line] = field(default_factory=list)
    """Other arguments of srun, such as --container-env=NAME, with which a variable's value on the node overrides the image's.
    They come after --mpi=none, and override it."""
    env_vars: Variables = field(default_factory=dict)
    """Environment variables of the ranks."""


@dataclass
class EnvironmentComponentConfig(ComponentConfig):
    """The ranks that run environments, agents and sandboxes on nodes of their own, which need no GPUs.

    Each rank serves some of the engines: engines are divided among the ranks, or ranks among the engines if there are more.
    """

    nodes: Annotated[NotNegative, Field(le=1 << 16)] = 0
    """Number of nodes. 0: environments run on the generate ranks' nodes."""
    exclusive: Bool | None = True
    """Allocate whole nodes, with all CPUs and memory. With false, set cpus_per_task and mem: environments use what they get."""


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
OF_CONTAINER = ("container_image", "container_mounts", "container_workdir", "container_args", "python")
"""Keys that cluster.environment takes from cluster.generate, whose packages its ranks need."""
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


def _apart() -> ComponentConfig:
    return ComponentConfig(**{key: _of_train(key, apart, "cluster.share_nodes") for key, apart in OF_NODES.items()})


def _environment() -> EnvironmentComponentConfig:
    same: Any = {key: f"${{cluster.generate.{key}}}" for key in OF_CONTAINER}
    return EnvironmentComponentConfig(**same)


def _of_gpu(component: str, name: str) -> Any:
    """Return a key's default: an interpolation of a number in the description of a component's GPU (`hardware.py`)."""
    return f"${{hardware:${{cluster.{component}.gpu}},{name}}}"


LATENCY_US = 20.0
"""Latency of one message, in microseconds, that plans assume."""
COPIES_GB_PER_S = 1500.0
"""Rate at which a rank gathers data to send and scatters received data, in GB/s, that plans assume."""


@dataclass
class NetworkConfig:
    """Network speeds that plan and judge refits. GB/s are 10^9 bytes per second in one direction."""

    nic_gb_per_s: Bandwidth = 50.0
    """Bandwidth of one rank to other nodes, in GB/s."""
    node_gb_per_s: Bandwidth = 450.0
    """Bandwidth of one rank within its node, for example over NVLink, in GB/s."""


@dataclass
class RequeueConfig:
    """Automatic restarts of a run, in the same job, from its last checkpoint."""

    enabled: Bool = True
    """Restart a run that ran out of time or crashed."""
    max_restarts: NotNegative = 3
    """Maximum restarts after crashes. A run that has saved no checkpoint since its last start is not restarted."""


@dataclass
class NodeChecksConfig:
    """Checks of every node before models load. The log names a node that fails, and a requeue excludes it."""

    enabled: Bool = True
    """Whether to check nodes."""
    min_gb_per_s: Annotated[Float | None, Field(ge=1e-6)] = None
    """Minimum bandwidth between neighbors in the ring of nodes, in GB/s. null: measure and report only."""


@dataclass
class ClusterConfig:
    """The machines of a run."""

    executor: Literal["auto", "slurm", "allocation", "local"] = "auto"
    """auto: the allocation that submit.py runs in, else slurm if a controller answers, else local."""
    time_min: Positive = 240
    """Time limit of one allocation, in minutes. requeue continues the run in another one."""
    container_runtime: Literal["pyxis", "apptainer", "none"] = "pyxis"
    """What starts the ranks of a component that has a container_image. pyxis: Slurm's plugin, with enroot. apptainer:
    `apptainer exec`, or else `singularity exec`, in each task of srun. none: no component may have an image."""
    requeue: RequeueConfig = field(default_factory=RequeueConfig)
    node_checks: NodeChecksConfig = field(default_factory=NodeChecksConfig)
    sbatch_options: Options = field(default_factory=dict)
    """Other sbatch options for the nodes of every component, as in {reservation: weekly, exclude: 'n[3-4]', contiguous: null};
    null for an option without a value. Options that another key sets are refused."""
    audit: Annotated[Line, Check(_audit_error)] = AUDIT_AUTO
    """Folder of the audit log of submissions, cancellations, changes of live runs, and exports. auto: the first of these that
    has a log or that you may write: folders named runs above the run folder (topmost first), its parent, the run folder. none:
    no log. If the log cannot be written, nothing is submitted."""
    share_nodes: Bool = False
    """Put all components on the same nodes, each with its own GPUs. For example, of 8 GPUs per node, gpus_per_node is 4 in
    train and 4 in generate."""
    train: ComponentConfig = field(default_factory=ComponentConfig)
    generate: ComponentConfig = field(default_factory=_generate)
    reward: ComponentConfig = field(default_factory=_apart)
    """Used only if an environment has served_by=reward."""
    judge: ComponentConfig = field(default_factory=_apart)
    """Used only if judge.model_name names a model."""
    environment: EnvironmentComponentConfig = field(default_factory=_environment)
    """Used only if its nodes are not 0. Its default container is that of cluster.generate, whose env_vars apply too."""
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

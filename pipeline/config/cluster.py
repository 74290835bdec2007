"""The recipe's keys of where a run runs: the components of its job, timeouts, requeueing, checks of nodes, the network."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.sbatch import Options
from pipeline.values import Bool, Float, Line, NotNegative, Positive, Variables, Word

COLOCATED = "policy.generation.colocated.enabled"


Seconds = Annotated[Float, Field(ge=1e-3)]
Bandwidth = Annotated[Float, Field(ge=1e-3)]


@dataclass
class TimeoutsConfig:
    """Longest waits, in seconds. A longer one ends the run, and names the verb, the phase and the ranks."""

    join: Annotated[Seconds, Field(description="Until all ranks have met.")] = 600.0
    silence: Annotated[Seconds, Field(description="Until a rank is heard from. Ten times that while ranks load.")] = 60.0
    setup: Annotated[Seconds, Field(description="Loading models and making groups.")] = 3600.0
    rollout: Annotated[Seconds, Field(description="Sampling a step's answers.")] = 7200.0
    train: Annotated[Seconds, Field(description="A step's training.")] = 7200.0
    refit: Annotated[Seconds, Field(description="Moving weights to the engines.")] = 1800.0
    save: Annotated[
        Seconds, Field(description="Saving a checkpoint. Before it, rank 0 waits as long for rollouts still being written.")
    ] = 3600.0
    storage: Annotated[
        Seconds | None,
        Field(description="While the run folder's disk is full, read-only or away. null: 600, or half of save if less."),
    ] = None


@dataclass
class ComponentConfig:
    """The ranks of one component of the heterogeneous job.

    The executor `local` reads only nodes, gpus_per_node, ranks_per_node and env_vars, and the plan gpu and gpu_memory_gb.
    """

    nodes: Annotated[Positive, Field(le=1 << 16, description="Nodes.")] = 1
    gpus_per_node: Annotated[NotNegative, Field(le=1024, description="GPUs on each node.")] = 0
    gpu: Annotated[
        Line,
        Field(
            description="The GPU, for the plan: a file in recipes/hardware/, without .yaml, or a path to one. Its"
            " compute_capability decides on flash_attention=3 and on CUDA_DEVICE_MAX_CONNECTIONS of Megatron-Core's ranks."
        ),
    ] = "h100"
    gpu_memory_gb: Annotated[
        Float | None, Field(ge=1, description="Memory of one GPU, in 10^9 bytes. null: as described for `gpu`.")
    ] = None
    ranks_per_node: Annotated[Positive | None, Field(le=1024, description="null: one per GPU, or 1 without GPUs.")] = None
    cpus_per_task: Annotated[
        Positive | None,
        Field(description="CPUs of a rank. null: ranks with GPUs share all CPUs that the job has on a node, others have one."),
    ] = None
    partition: Annotated[Word | None, Field(description="sbatch's --partition.")] = None
    account: Annotated[Word | None, Field(description="sbatch's --account.")] = None
    qos: Annotated[Word | None, Field(description="sbatch's --qos.")] = None
    mem: Annotated[
        Line | None,
        Field(
            description="Memory of each node: 500G, say; 0: all; default: what Slurm gives. null: 0 on whole nodes, else"
            " default."
        ),
    ] = None
    constraint: Annotated[Line | None, Field(description="sbatch's --constraint.")] = None
    exclusive: Annotated[
        Bool | None,
        Field(
            description="Whole nodes, with all their CPUs and memory. null: true with GPUs, as in NeMo-RL's ray.sub, since"
            " Slurm otherwise gives a rank one CPU and little memory. Where a site forbids --exclusive or --mem: false with"
            " cpus_per_task and mem, or mem=default."
        ),
    ] = None
    sbatch_options: Annotated[
        Options,
        Field(description="More options of sbatch for these nodes. They override cluster.sbatch_options."),
    ] = field(default_factory=dict)
    container_image: Annotated[Line | None, Field(description="Image for pyxis. null: no container.")] = None
    container_mounts: Annotated[list[Line] | None, Field(description="Mounts, as SOURCE:TARGET[:FLAGS].")] = None
    container_workdir: Annotated[Line | None, Field(description="Working directory in the container.")] = None
    container_env: Annotated[list[Line], Field(description="Variables whose value on the node overrides the image's own.")] = (
        field(default_factory=list)
    )
    container_writable: Annotated[
        Bool | None, Field(description="Whether the container can be written to. null: as the site configured pyxis.")
    ] = None
    python: Annotated[Line | None, Field(description="Python in the container. null: the one that submits.")] = None
    srun_args: Annotated[list[Line], Field(description="More arguments of srun.")] = field(default_factory=list)
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
"""Components on the same nodes (cluster.share_nodes) all have these keys of cluster.train. The values are the defaults where
they have nodes of their own."""
SHARED = {**OF_NODES, "gpus_per_node": 0}
"""cluster.generate has these keys of cluster.train with policy.generation.colocated.enabled."""


def _of_train(key: str, apart: object, *conditions: str) -> str:
    """Return a key's default in another component: cluster.train's if one of the conditions, which are keys, is true."""
    value = json.dumps(apart)
    for condition in conditions:
        value = f"${{if:${{{condition}}},${{cluster.train.{key}}},{value}}}"
    return value


def _generate() -> ComponentConfig:
    beside = {key: _of_train(key, apart, "cluster.share_nodes", COLOCATED) for key, apart in OF_NODES.items()}
    return ComponentConfig(**beside, gpus_per_node=_of_train("gpus_per_node", 0, COLOCATED))


def _reward() -> ComponentConfig:
    return ComponentConfig(**{key: _of_train(key, apart, "cluster.share_nodes") for key, apart in OF_NODES.items()})


def _of_gpu(component: str, name: str) -> str:
    """Return a key's default: a number of the description of a component's GPU, which `hardware.py` resolves."""
    return f"${{hardware:${{cluster.{component}.gpu}},{name}}}"


@dataclass
class NetworkConfig:
    """Speeds by which refits are planned and judged. GB/s are 10^9 bytes per second, in one direction.

    The first two are those of cluster.train.gpu unless the recipe gives them.
    """

    nic_gb_per_s: Annotated[Bandwidth, Field(description="GB/s of one rank to other nodes.")] = 50.0
    node_gb_per_s: Annotated[Bandwidth, Field(description="GB/s of one rank within its node, as by NVLink.")] = 450.0
    latency_us: Annotated[Float, Field(ge=0, description="Microseconds of a message.")] = 20.0
    memory_gb_per_s: Annotated[
        Bandwidth, Field(description="GB/s at which a rank gathers what it sends and places what it received.")
    ] = 1500.0


@dataclass
class RequeueConfig:
    """Restarts of a run by itself, in the same job, from its last checkpoint."""

    enabled: Annotated[Bool, Field(description="false: a run that ran out of time, or crashed, is not started again.")] = True
    max_restarts: Annotated[
        NotNegative, Field(description="Restarts after crashes. There is none without a checkpoint since the last start.")
    ] = 3


@dataclass
class NodeChecksConfig:
    """Checks that every node must pass before anything is loaded. A node that fails is named, and excluded by a requeue."""

    enabled: Annotated[Bool, Field(description="Whether nodes are checked.")] = True
    min_gb_per_s: Annotated[
        Float | None,
        Field(ge=1e-6, description="GB/s between neighbours of the ring of nodes. null: measured and reported, not judged."),
    ] = None
    max_clock_skew_s: Annotated[Seconds, Field(description="Seconds by which two clocks may differ.")] = 5.0


@dataclass
class ClusterConfig:
    """The machines that a run uses."""

    executor: Annotated[
        Literal["auto", "slurm", "allocation", "local"],
        Field(description="auto: the allocation that it is in, else slurm where a controller answers, else local."),
    ] = "auto"
    time_min: Annotated[Positive, Field(description="Minutes of one allocation; see requeue.")] = 240
    requeue: RequeueConfig = field(default_factory=RequeueConfig)
    node_checks: NodeChecksConfig = field(default_factory=NodeChecksConfig)
    sbatch_options: Annotated[
        Options,
        Field(
            description="More options of sbatch for every component's nodes: {reservation: weekly, exclude: 'n[3-4]',"
            " contiguous: null}, null for one without a value. Those that another key stands for are refused."
        ),
    ] = field(default_factory=dict)
    share_nodes: Annotated[
        Bool,
        Field(
            description="All components are on the same nodes, each with GPUs of its own: of 8, gpus_per_node may be 4 in train"
            " and 4 in generate."
        ),
    ] = False
    train: ComponentConfig = field(default_factory=ComponentConfig)
    generate: ComponentConfig = field(default_factory=_generate)
    reward: Annotated[ComponentConfig, Field(description="Only if an environment is served_by reward.")] = field(
        default_factory=_reward
    )
    network: NetworkConfig = field(
        default_factory=lambda: NetworkConfig(
            nic_gb_per_s=_of_gpu("train", "nic_gb_per_s"),  # type: ignore[arg-type]
            node_gb_per_s=_of_gpu("train", "nvlink_gb_per_s"),  # type: ignore[arg-type]
        )
    )
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)


def ranks(component: ComponentConfig) -> int:
    """Return how many processes a component has."""
    return component.nodes * ranks_per_node(component)


def ranks_per_node(component: ComponentConfig) -> int:
    return component.ranks_per_node or max(1, component.gpus_per_node)

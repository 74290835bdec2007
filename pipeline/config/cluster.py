"""Where a run runs, and how it lives there: the components of its job, timeouts, requeueing, checks of nodes, the network."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Optional  # OmegaConf reads these annotations at run time

COLOCATED = "policy.generation.colocated.enabled"


@dataclass
class TimeoutsConfig:
    """Seconds. A wait that outlasts its bound ends the run and names the verb, the phase and the ranks."""

    join: float = 600.0  # all ranks meet
    silence: float = 60.0  # a rank that has not been heard from at all; ten times that while ranks load
    setup: float = 3600.0
    rollout: float = 7200.0
    train: float = 7200.0
    refit: float = 1800.0
    save: float = 3600.0  # a checkpoint; before it, rank 0 waits as long for rollouts that are still being written
    storage: Optional[float] = None  # the run folder's disk is full, read-only or away; null: 600, or half of save if less


@dataclass
class ComponentConfig:
    """The ranks of one realm, as a component of the heterogeneous job. On `local` only nodes * ranks_per_node counts."""

    nodes: int = 1
    gpus_per_node: int = 0
    # What the plan takes a GPU for: a file in recipes/hardware/, without .yaml, or a path to one. By its compute_capability
    # flash_attention=3 is checked, and Megatron-Core's train ranks get CUDA_DEVICE_MAX_CONNECTIONS (launch/cuda_variables.py).
    gpu: str = "h100"
    gpu_memory_gb: Optional[float] = None  # of one GPU, in units of 10^9 bytes; null: the described GPU's
    ranks_per_node: Optional[int] = None  # null: one per GPU, or 1
    cpus_per_task: Optional[int] = None  # null: ranks with GPUs share all CPUs that the job has on a node, others have one each
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    mem: Optional[str] = None  # of each node: 500G; 0: all; default: what Slurm gives; null: 0 on whole nodes, else default
    constraint: Optional[str] = None
    # Whole nodes, with all their CPUs and memory. null: true with GPUs, as in NeMo-RL's ray.sub, since Slurm else gives a rank
    # one CPU and some memory. Where a site forbids --exclusive or --mem: false with cpus_per_task and mem, or mem=default.
    exclusive: Optional[bool] = None
    sbatch_options: dict[str, Optional[str]] = field(default_factory=dict)  # of these nodes; they go before cluster's own
    container_image: Optional[str] = None
    container_mounts: Optional[list[str]] = None
    container_workdir: Optional[str] = None
    container_env: list[str] = field(default_factory=list)  # variables whose value on the node goes before the image's own
    container_writable: Optional[bool] = None  # null: as the site has configured pyxis
    python: Optional[str] = None  # the interpreter inside the container; null: the one that submits
    srun_args: list[str] = field(default_factory=list)
    env_vars: dict[str, str] = field(default_factory=dict)


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
    """What the refit is planned and judged by. GB/s are 10^9 bytes a second, one way. A recipe that leaves the first two open
    has those of cluster.train.gpu."""

    nic_gb_per_s: float = 50.0  # of one rank, to other nodes
    node_gb_per_s: float = 450.0  # of one rank, within its node: NVLink 4
    latency_us: float = 20.0  # of a message
    memory_gb_per_s: float = 1500.0  # at which a rank gathers what it sends and places what it received


@dataclass
class RequeueConfig:
    """How a run goes on by itself, in the same job, from its last checkpoint."""

    enabled: bool = True  # false: what had to be left, or crashed, is not started again
    max_restarts: int = 3  # after crashes; none without a new checkpoint since the last start


@dataclass
class NodeChecksConfig:
    """What every node must pass before anything is loaded. A node that fails is named, and left out by a requeue."""

    enabled: bool = True
    min_gb_per_s: Optional[float] = None  # between two neighbours of the ring of nodes; null: measured and told, not judged
    max_clock_skew_s: float = 5.0


@dataclass
class ClusterConfig:
    # auto, slurm, allocation, local; auto: the allocation that it is in, else slurm where a controller answers
    executor: str = "auto"
    time_min: int = 240  # of one allocation; see requeue
    requeue: RequeueConfig = field(default_factory=RequeueConfig)
    node_checks: NodeChecksConfig = field(default_factory=NodeChecksConfig)
    # More options for sbatch, of every component's nodes: {reservation: weekly, exclude: "n[3-4]", contiguous: null}, null for
    # one that takes no value. Those that another key stands for are refused.
    sbatch_options: dict[str, Optional[str]] = field(default_factory=dict)
    # All components are on the same nodes, each with GPUs of its own: of 8, gpus_per_node may be 4 in train and 4 in generate.
    share_nodes: bool = False
    train: ComponentConfig = field(default_factory=ComponentConfig)
    generate: ComponentConfig = field(default_factory=_generate)
    reward: ComponentConfig = field(default_factory=_reward)  # only if an environment is served_by reward
    network: NetworkConfig = field(
        default_factory=lambda: NetworkConfig(
            nic_gb_per_s=_of_gpu("train", "nic_gb_per_s"),  # type: ignore[arg-type]
            node_gb_per_s=_of_gpu("train", "nvlink_gb_per_s"),  # type: ignore[arg-type]
        )
    )
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)


def ranks(component: ComponentConfig) -> int:
    """How many processes a component has."""
    return component.nodes * ranks_per_node(component)


def ranks_per_node(component: ComponentConfig) -> int:
    return component.ranks_per_node or max(1, component.gpus_per_node)

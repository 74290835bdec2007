"""Says which components share nodes, what is asked of Slurm for them, and what each component's ranks take of a node.

A component has nodes of its own or is a guest on those of the component before it: it takes turns with it on the same GPUs
(policy.generation.colocated), or has GPUs of its own beside it (cluster.share_nodes).

All steps on shared nodes overlap and get the same GPUs, and each rank narrows CUDA_VISIBLE_DEVICES to those of its component.
Slurm can also give each step GPUs of its own (srun --exact). But then cgroups hide the other step's GPUs, and NCCL uses NVLink
only between GPUs that it can see: https://github.com/NVIDIA/nccl/issues/1066. Such steps also wait for each other's resources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.config import ComponentConfig, ranks, ranks_per_node

SLURMS_DEFAULT = "default"
"""The value of `mem` with which no memory is asked for."""
PLACES = ("partition", "account", "qos", "constraint")
"""Keys of a component that say on which nodes it may run."""


@dataclass
class ColocatedComponent(ComponentConfig):
    """A component on the nodes of the one before it."""

    shares_gpus: bool = True  # on the GPUs of the one before it; else it computes beside it, on GPUs of its own


def shares_gpus(component: ComponentConfig) -> bool:
    """Return whether a component computes in turn with the one before it, on the same GPUs."""
    return isinstance(component, ColocatedComponent) and component.shares_gpus


@dataclass(frozen=True)
class NodeShare:
    """Describes what a component has of its nodes."""

    component: ComponentConfig
    host: ComponentConfig  # what all components on these nodes need together
    first_gpu: int  # the component's first among those of the host
    alone: bool  # no other component is on these nodes


def shares(components: dict[str, ComponentConfig]) -> dict[str, NodeShare]:
    """Return what each component has of its nodes."""
    found: dict[str, NodeShare] = {}
    for names in groups(components):
        host, first, following = _together([components[name] for name in names]), 0, 0
        for name in names:
            component = components[name]
            if not shares_gpus(component):
                first, following = following, following + component.gpus_per_node
            found[name] = NodeShare(component, host, first, len(names) == 1)
    return found


def groups(components: dict[str, ComponentConfig]) -> list[list[str]]:
    """Return the names of the components on the same nodes, for each set of nodes."""
    found: list[list[str]] = []
    for name, component in components.items():
        if isinstance(component, ColocatedComponent):
            found[-1].append(name)
        else:
            found.append([name])
    return found


def hosts(components: dict[str, ComponentConfig]) -> dict[str, ComponentConfig]:
    """Return what to ask of Slurm: the components that have nodes of their own, each with what it and its guests need."""
    return {names[0]: _together([components[name] for name in names]) for names in groups(components)}


def _together(components: list[ComponentConfig]) -> ComponentConfig:
    """Return the first component with what all need of a node: the sum, or the largest need where its guests take turns."""
    host, *guests = components
    if not guests:
        return host
    total = max if shares_gpus(guests[0]) else sum
    count = total([ranks_per_node(each) for each in components])
    cpus = total([ranks_per_node(each) * (each.cpus_per_task or 1) for each in components])
    return replace(
        host,
        ranks_per_node=count,
        gpus_per_node=total([each.gpus_per_node for each in components]),
        cpus_per_task=-(-cpus // count) if any(each.cpus_per_task for each in components) else None,
    )


# ---- what is asked of Slurm ---------------------------------------------------------------------------------------------


def takes_whole_nodes(component: ComponentConfig) -> bool:
    """Return whether no other job may be on the component's nodes."""
    return component.gpus_per_node > 0 if component.exclusive is None else component.exclusive


def memory(component: ComponentConfig) -> str | None:
    """Return the value for --mem, if any. Also of whole nodes Slurm gives only the memory that is asked for."""
    if component.mem is None:
        return "0" if takes_whole_nodes(component) else None
    return None if component.mem == SLURMS_DEFAULT else component.mem


def allocation_options(host: ComponentConfig) -> list[str]:
    """Return the options for sbatch or salloc that get nodes for a component of `hosts`. Nothing in them is quoted."""
    values = {
        "nodes": host.nodes,
        "ntasks-per-node": ranks_per_node(host),
        "cpus-per-task": host.cpus_per_task,
        "gpus-per-node": host.gpus_per_node or None,
        "mem": memory(host),
        **{key: getattr(host, key) for key in PLACES},
    }
    given = [f"--{key}={value}" for key, value in values.items() if value is not None]
    given += [f"--{key}" if value is None else f"--{key}={value}" for key, value in host.sbatch_options.items()]
    return [*given, "--exclusive"] if takes_whole_nodes(host) else given


def step_options(share: NodeShare) -> list[str]:
    """Return the options for the component's srun that say how many ranks, CPUs and GPUs it has.

    Steps on shared nodes ask for no CPUs: each gets all that the job has there, and its ranks are bound to none of them. Slurm
    gives a step the GPUs near its CPUs first, so steps with different CPUs could get different GPUs.
    """
    component = share.component
    options = [
        f"--nodes={component.nodes}",
        f"--ntasks={ranks(component)}",
        f"--ntasks-per-node={ranks_per_node(component)}",
    ]
    if component.cpus_per_task and share.alone:
        options.append(f"--cpus-per-task={component.cpus_per_task}")
    elif component.gpus_per_node or not share.alone:
        options.append("--cpu-bind=none")  # else Slurm would bind each rank to one CPU
    return [*options, f"--gpus-per-node={share.host.gpus_per_node}"] if component.gpus_per_node else options


# ---- what a rank takes --------------------------------------------------------------------------------------------------


def gpu_exports(share: NodeShare) -> list[str]:
    """Return lines of bash for a rank whose step has more GPUs than its component: they hide the other components' GPUs."""
    count, there = share.component.gpus_per_node, share.host.gpus_per_node
    if count in (0, there):
        return []
    shown = f"${{CUDA_VISIBLE_DEVICES:-{','.join(map(str, range(there)))}}}"  # not set where Slurm does not know the devices
    fields = f"{share.first_gpu + 1}-{share.first_gpu + count}"
    return [f'export CUDA_VISIBLE_DEVICES=$(cut -d, -f{fields} <<<"{shown}")']


def thread_exports(share: NodeShare) -> list[str]:
    """Return lines of bash that set OMP_NUM_THREADS where nobody has: a rank's share of its node's CPUs; 1 without GPUs."""
    component, count = share.component, ranks_per_node(share.host)
    if not component.gpus_per_node:
        threads = "1"
    elif component.cpus_per_task:
        threads = str(component.cpus_per_task)
    else:
        threads = f"$((SLURM_CPUS_ON_NODE > {count} ? SLURM_CPUS_ON_NODE / {count} : 1))"
    return [f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}}"]

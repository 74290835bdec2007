"""Decide which components share nodes, and build the Slurm options of their allocation, steps and ranks.

A component has nodes of its own, or is colocated on the nodes of the component before it. Colocated components use the same
GPUs in turn (policy.generation.colocated), or divide the GPUs of each node between them (cluster.share_nodes).

All steps on shared nodes overlap and get the same GPUs, and each rank narrows CUDA_VISIBLE_DEVICES to the GPUs of its
component. Slurm could also give each step GPUs of its own (srun --exact). But then cgroups would hide the GPUs of other steps,
and NCCL uses NVLink only between GPUs that it can see: https://github.com/NVIDIA/nccl/issues/1066. Such steps would also wait
for each other's resources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.config import ComponentConfig, ranks, ranks_per_node

SLURMS_DEFAULT = "default"
"""Value of a component's `mem` for which --mem is omitted, so that Slurm's default counts."""
COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"
MOST_COMPILERS = 32
"""Maximum number of compile processes of a rank: Inductor's default (torch/_inductor/config.py, decide_compile_threads)."""
NODE_KEYS = ("partition", "account", "qos", "constraint")
"""Keys of a component that select its nodes."""


@dataclass
class ColocatedComponent(ComponentConfig):
    """A component on the nodes of the component before it."""

    shares_gpus: bool = True  # uses the GPUs of the component before it in turn; False: has GPUs of its own


def shares_gpus(component: ComponentConfig) -> bool:
    """Return whether a component and the component before it use the same GPUs in turn."""
    return isinstance(component, ColocatedComponent) and component.shares_gpus


@dataclass(frozen=True)
class NodeShare:
    """A component's part of the nodes on which it runs."""

    component: ComponentConfig
    host: ComponentConfig  # the total need of all components on these nodes
    first_gpu: int  # index of the component's first GPU on each node
    alone: bool  # whether no other component is on these nodes


def shares(components: dict[str, ComponentConfig]) -> dict[str, NodeShare]:
    """Return component's name -> the component's part of its nodes."""
    shares_of: dict[str, NodeShare] = {}
    for names in groups(components):
        host, first, following = _total_need([components[name] for name in names]), 0, 0
        for name in names:
            component = components[name]
            if not shares_gpus(component):
                first, following = following, following + component.gpus_per_node
            shares_of[name] = NodeShare(component, host, first, len(names) == 1)
    return shares_of


def groups(components: dict[str, ComponentConfig]) -> list[list[str]]:
    """Return a list for each set of nodes: the names of the components on these nodes."""
    names_of: list[list[str]] = []
    for name, component in components.items():
        if isinstance(component, ColocatedComponent):
            names_of[-1].append(name)
        else:
            names_of.append([name])
    return names_of


def hosts(components: dict[str, ComponentConfig]) -> dict[str, ComponentConfig]:
    """Return name -> component for the components whose nodes Slurm allocates, each with the total need on its nodes."""
    return {names[0]: _total_need([components[name] for name in names]) for names in groups(components)}


def _total_need(components: list[ComponentConfig]) -> ComponentConfig:
    """Return the first component with the needs of all: their sum, or the maximum if the components use GPUs in turn."""
    host, *others = components
    if not others:
        return host
    total = max if shares_gpus(others[0]) else sum
    count = total([ranks_per_node(component) for component in components])
    cpus = total([ranks_per_node(component) * (component.cpus_per_task or 1) for component in components])
    return replace(
        host,
        ranks_per_node=count,
        gpus_per_node=total([component.gpus_per_node for component in components]),
        cpus_per_task=-(-cpus // count) if any(component.cpus_per_task for component in components) else None,
    )


# ---- options for Slurm --------------------------------------------------------------------------------------------------


def takes_whole_nodes(component: ComponentConfig) -> bool:
    """Return whether other jobs are excluded from the component's nodes."""
    return component.gpus_per_node > 0 if component.exclusive is None else component.exclusive


def memory(component: ComponentConfig) -> str | None:
    """Return the value of --mem; None to omit it. Even with whole nodes, Slurm grants only the memory that is requested."""
    if component.mem is None:
        return "0" if takes_whole_nodes(component) else None
    return None if component.mem == SLURMS_DEFAULT else component.mem


def allocation_options(host: ComponentConfig) -> list[str]:
    """Return the unquoted options of sbatch or salloc that request the nodes of a component of `hosts`."""
    values = {
        "nodes": host.nodes,
        "ntasks-per-node": ranks_per_node(host),
        "cpus-per-task": host.cpus_per_task,
        "gpus-per-node": host.gpus_per_node or None,
        "mem": memory(host),
        **{key: getattr(host, key) for key in NODE_KEYS},
    }
    options = [f"--{key}={value}" for key, value in values.items() if value is not None]
    options += [f"--{key}" if value is None else f"--{key}={value}" for key, value in host.sbatch_options.items()]
    return [*options, "--exclusive"] if takes_whole_nodes(host) else options


def step_options(share: NodeShare) -> list[str]:
    """Return the options of a component's srun: its ranks, CPUs and GPUs.

    Steps on shared nodes request no CPUs: each gets all CPUs of the job on its nodes, and its ranks are not bound to CPUs.
    Slurm prefers the GPUs near a step's CPUs, so steps that request different CPUs could get different GPUs.
    """
    component = share.component
    options = [
        f"--nodes={component.nodes}",
        f"--ntasks={ranks(component)}",
        f"--ntasks-per-node={ranks_per_node(component)}",
    ]
    if component.cpus_per_task and share.alone:
        options.append(f"--cpus-per-task={component.cpus_per_task}")
    elif takes_whole_nodes(component) or component.gpus_per_node or not share.alone:
        options.append("--cpu-bind=none")  # otherwise Slurm binds each rank to one CPU
    return [*options, f"--gpus-per-node={share.host.gpus_per_node}"] if component.gpus_per_node else options


# ---- environment of a rank ----------------------------------------------------------------------------------------------


def gpu_exports(share: NodeShare) -> list[str]:
    """Return lines of bash that hide from a rank the GPUs of other components; [] if its step has none of them.

    The lines hide all GPUs if the component has none: its nodes may have GPUs, and Slurm hides these only with ConstrainDevices
    (cgroup.conf).
    """
    count, there = share.component.gpus_per_node, share.host.gpus_per_node
    if not count:
        return ["export CUDA_VISIBLE_DEVICES="]
    if count == there:
        return []
    shown = f"${{CUDA_VISIBLE_DEVICES:-{','.join(map(str, range(there)))}}}"  # unset if Slurm does not manage GPUs
    fields = f"{share.first_gpu + 1}-{share.first_gpu + count}"
    return [f'export CUDA_VISIBLE_DEVICES=$(cut -d, -f{fields} <<<"{shown}")']


def thread_exports(share: NodeShare) -> list[str]:
    """Return lines of bash that set OMP_NUM_THREADS, unless it is set already.

    Its value is cpus_per_task or else the rank's share of the node's CPUs; 1 for a component without GPUs. With GPUs the lines
    also set the number of Inductor's compile processes to that value, but at most to Inductor's default.
    """
    component, count = share.component, ranks_per_node(share.host)
    if not component.gpus_per_node:
        threads = "1"
    elif component.cpus_per_task:
        threads = str(component.cpus_per_task)
    else:
        threads = f"$((SLURM_CPUS_ON_NODE > {count} ? SLURM_CPUS_ON_NODE / {count} : 1))"
    lines = [f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}}"]
    if component.gpus_per_node:
        compilers = f"$(({threads} < {MOST_COMPILERS} ? {threads} : {MOST_COMPILERS}))"
        lines.append(f"export {COMPILERS}=${{{COMPILERS}:-{compilers}}}")
    return lines

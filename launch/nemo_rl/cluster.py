"""Who gets which GPUs: `cluster`, `policy.generation.colocated`, and the reward model's `resources`.

There, train and generate ranks share GPUs by default; so they do here. Beside a reward model with GPUs of its own ours are
disjoint: such a recipe gets as many GPUs again, and is told so.
"""

from __future__ import annotations

from launch.nemo_rl.ledger import Ledger
from launch.nemo_rl.rules import apply, ignored

NODES, GPUS = "cluster.num_nodes", "cluster.gpus_per_node"
COLOCATED = "policy.generation.colocated"

CLUSTER = (
    ignored("cluster.master_port_range_*"),
    ignored("cluster.segment_size", why="which nodes a job gets is Slurm's; cluster.<component>.constraint may say"),
)


def translate(ledger: Ledger, samples: bool, rewarded: str | None) -> None:
    """samples: whether the algorithm does. rewarded: the key of an environment whose reward model has GPUs of its own."""
    nodes, gpus = ledger.take(NODES, 1), ledger.take(GPUS)
    if not all(isinstance(n, int) and n > 0 for n in (nodes, gpus)):
        ledger.problem(f"{NODES}, {GPUS}", f"{nodes} nodes with {gpus} GPUs each; both must be given, and at least 1")
        return
    reward_nodes, reward_gpus = _reward(ledger, rewarded)
    nodes_left, gpus_left = (nodes, gpus - reward_gpus) if nodes == 1 else (nodes - reward_nodes, gpus)
    if nodes_left < 1 or gpus_left < 1:
        ledger.problem(f"{rewarded}.resources", f"{reward_nodes} x {reward_gpus} leave nothing of {nodes} x {gpus} GPUs")
        return
    asked = samples and ledger.get(f"{COLOCATED}.enabled", True) is not False
    if asked and rewarded:
        _double(ledger, nodes_left, gpus_left, rewarded)
    elif asked or not samples:  # of what is shared, cluster.generate has what cluster.train has
        _component(ledger, "train", nodes, NODES, gpus, GPUS)
    else:
        _split(ledger, nodes_left, gpus_left)
        if nodes == 1:
            ledger.put("cluster.share_nodes", True, f"{COLOCATED}.enabled")
    if samples:
        ledger.put(f"{COLOCATED}.enabled", asked and not rewarded, f"{COLOCATED}.enabled")
        for name in ("enabled", "resources.num_nodes", "resources.gpus_per_node"):
            ledger.take(f"{COLOCATED}.{name}")
        if ledger.get(f"{COLOCATED}.resources") is None:
            ledger.take(f"{COLOCATED}.resources")
    apply(ledger, CLUSTER)


def environment_variables(ledger: Ledger, theirs: str, ours: str) -> None:
    """Of a kind of process. NeMo-RL's own and Ray's mean nothing here."""
    for name in ledger.get(theirs) or {}:
        key = f"{theirs}.{name}"
        if name.startswith(("NRL_", "RAY_")) or "_RAY_" in name:
            ledger.take(key)
            ledger.ignore(key, "only NeMo-RL or Ray reads it")
        else:
            ledger.put(f"{ours}.{name}", str(ledger.take(key)), key)
    ledger.take(theirs)


def _component(ledger: Ledger, name: str, nodes: int, nodes_key: str, gpus: int, gpus_key: str) -> None:
    ledger.put(f"cluster.{name}.nodes", nodes, nodes_key)
    ledger.put(f"cluster.{name}.gpus_per_node", gpus, gpus_key)


def _reward(ledger: Ledger, rewarded: str | None) -> tuple[int, int]:
    """(nodes, GPUs on each) of the reward model."""
    if rewarded is None:
        return 0, 0
    key = f"{rewarded}.resources"
    nodes, gpus = ledger.take(f"{key}.num_nodes", 1), ledger.take(f"{key}.gpus_per_node", 0)
    _component(ledger, "reward", nodes, f"{key}.num_nodes", gpus, f"{key}.gpus_per_node")
    return nodes, gpus


def _double(ledger: Ledger, nodes: int, gpus: int, rewarded: str) -> None:
    _component(ledger, "train", nodes, NODES, gpus, GPUS)
    _component(ledger, "generate", nodes, NODES, gpus, GPUS)
    ledger.changed.insert(
        0,
        f"{COLOCATED}.enabled=true: there the ranks that train and those that generate take turns on {nodes} x {gpus} GPUs;"
        f" here, beside {rewarded} with GPUs of its own, each have {nodes} x {gpus}, at the same time. Fewer:"
        " cluster.generate.nodes and .gpus_per_node",
    )


def _split(ledger: Ledger, nodes: int, gpus: int) -> None:
    """On one node the GPUs are divided, of several the nodes."""
    key = f"{COLOCATED}.resources"
    generate_nodes, generate_gpus = ledger.get(f"{key}.num_nodes"), ledger.get(f"{key}.gpus_per_node")
    if nodes == 1:
        if not generate_gpus or generate_gpus >= gpus or generate_nodes not in (None, 1):
            ledger.problem(
                key,
                f"num_nodes {generate_nodes} and gpus_per_node {generate_gpus} cannot be divided off one node with {gpus} GPUs;"
                f" num_nodes null, gpus_per_node from 1 to {gpus - 1}",
            )
            return
        _component(ledger, "train", 1, NODES, gpus - generate_gpus, GPUS)
        _component(ledger, "generate", 1, f"{key}.num_nodes", generate_gpus, f"{key}.gpus_per_node")
        return
    if not generate_nodes or generate_nodes >= nodes or generate_gpus != gpus:
        ledger.problem(
            key,
            f"num_nodes {generate_nodes} and gpus_per_node {generate_gpus} cannot be divided off {nodes} nodes of {gpus} GPUs;"
            f" num_nodes from 1 to {nodes - 1}, gpus_per_node {gpus}",
        )
        return
    _component(ledger, "train", nodes - generate_nodes, NODES, gpus, GPUS)
    _component(ledger, "generate", generate_nodes, f"{key}.num_nodes", generate_gpus, f"{key}.gpus_per_node")

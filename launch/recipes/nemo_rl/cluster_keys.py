"""Translate the placement of ranks: `cluster`, `policy.generation.colocated`, and the reward model's `resources`.

Train and generate ranks share GPUs by default in NeMo-RL, and so in a translated recipe. In Hetstep they cannot share if a
reward model has GPUs of its own: then each component gets as many GPUs as both share in NeMo-RL, and a note says so.
"""

from __future__ import annotations

from launch.recipes.translation.rules import Ignored, apply
from launch.recipes.translation.translator import Translator

NODES, GPUS = "cluster.num_nodes", "cluster.gpus_per_node"
COLOCATED = "policy.generation.colocated"
RESOURCES = f"{COLOCATED}.resources"

CLUSTER = (
    Ignored("cluster.master_port_range_*"),
    Ignored("cluster.segment_size", "Slurm selects the nodes of a job; cluster.<component>.constraint restricts them"),
)


def translate(t: Translator, samples: bool, rewarded: str | None) -> None:
    """Translate the nodes and GPUs of each component.

    samples: whether the algorithm samples. rewarded: the key of the environment whose reward model has GPUs of its own, or
    None.
    """
    nodes, gpus = t.consume(NODES, 1), t.consume(GPUS)
    if not all(isinstance(n, int) and n > 0 for n in (nodes, gpus)):
        t.problem(
            NODES if gpus else GPUS,
            "too-small",
            f"got {nodes} nodes with {gpus} GPUs each; expected at least 1 node with 1 GPU",
        )
        return
    reward_nodes, reward_gpus = _reward(t, rewarded)
    nodes_left, gpus_left = (nodes, gpus - reward_gpus) if nodes == 1 else (nodes - reward_nodes, gpus)
    if nodes_left < 1 or gpus_left < 1:
        message = f"got {reward_nodes} nodes with {reward_gpus} GPUs each; expected fewer than all {nodes} x {gpus} GPUs"
        t.problem(f"{rewarded}.resources", "too-large", message)
        return
    shares = samples and t.get(f"{COLOCATED}.enabled", True) is not False
    if shares and rewarded:
        for name in ("train", "generate"):
            _component(t, name, nodes_left, NODES, gpus_left, GPUS)
        t.changed.insert(
            0,
            f"{COLOCATED}.enabled=true: in NeMo-RL train and generate ranks take turns on {nodes_left} x {gpus_left} GPUs;"
            f" here {rewarded} has separate GPUs, so train and generate ranks get {nodes_left} x {gpus_left} GPUs each. Set"
            " cluster.generate.nodes and .gpus_per_node to use fewer",
        )
    elif shares or not samples:  # cluster.generate equals cluster.train if they share GPUs
        _component(t, "train", nodes, NODES, gpus, GPUS)
    else:
        _split(t, nodes_left, gpus_left)
        if nodes == 1:
            t.put("cluster.share_nodes", True, f"{COLOCATED}.enabled")
    if samples:
        t.put(f"{COLOCATED}.enabled", shares and not rewarded)
        for name in ("enabled", "resources.num_nodes", "resources.gpus_per_node"):
            t.consume(f"{COLOCATED}.{name}")
        if t.get(RESOURCES) is None:
            t.consume(RESOURCES)
    apply(t, CLUSTER)


def environment_variables(t: Translator, theirs: str, ours: str) -> None:
    """Translate the environment variables at NeMo-RL's key `theirs` to our key `ours`.

    Variables of NeMo-RL and Ray have no effect here.
    """
    for name in t.get(theirs) or {}:
        key = f"{theirs}.{name}"
        if name.startswith(("NRL_", "RAY_")) or "_RAY_" in name:
            t.ignore(key, "only NeMo-RL or Ray reads this variable")
        elif t.get(key) is None:
            t.problem(key, "wrong-type", "got null; expected a string. Try without it")
        else:
            t.put(f"{ours}.{name}", str(t.get(key)), key)
    t.consume(theirs)


def _component(t: Translator, name: str, nodes: int, nodes_key: str, gpus: int, gpus_key: str) -> None:
    t.put(f"cluster.{name}.nodes", nodes, nodes_key)
    t.put(f"cluster.{name}.gpus_per_node", gpus, gpus_key)


def _reward(t: Translator, rewarded: str | None) -> tuple[int, int]:
    """Translate the nodes and GPUs of the reward model, and return (nodes, GPUs per node); (0, 0) without one."""
    if rewarded is None:
        return 0, 0
    keys = f"{rewarded}.resources.num_nodes", f"{rewarded}.resources.gpus_per_node"
    nodes, gpus = t.consume(keys[0], 1), t.consume(keys[1], 0)
    _component(t, "reward", nodes, keys[0], gpus, keys[1])
    return nodes, gpus


def _split(t: Translator, nodes: int, gpus: int) -> None:
    """Divide the GPUs of a single node, or else whole nodes, between train and generate ranks."""
    its_nodes, its_gpus = t.get(f"{RESOURCES}.num_nodes"), t.get(f"{RESOURCES}.gpus_per_node")
    if nodes == 1:
        fits = its_gpus and its_gpus < gpus and its_nodes in (None, 1)
        expected, train = f"num_nodes null, gpus_per_node from 1 to {gpus - 1}", (1, gpus - (its_gpus or 0))
    else:
        fits = its_nodes and its_nodes < nodes and its_gpus == gpus
        expected, train = f"num_nodes from 1 to {nodes - 1}, gpus_per_node {gpus}", (nodes - (its_nodes or 0), gpus)
    if not fits:
        message = f"got num_nodes {its_nodes} and gpus_per_node {its_gpus} of {nodes} x {gpus} GPUs; expected {expected}"
        t.problem(RESOURCES, "not-divisible", message)
        return
    _component(t, "train", train[0], NODES, train[1], GPUS)
    _component(t, "generate", its_nodes or 1, f"{RESOURCES}.num_nodes", its_gpus, f"{RESOURCES}.gpus_per_node")

"""The node checks measure links and clocks, and find outlier nodes."""

from dataclasses import replace

import pytest

from pipeline.config import ClusterConfig, ComponentConfig
from pipeline.job.world import WorkerGroups
from pipeline.node import builds
from pipeline.node_checks import diagnosis, probe, ring
from pipeline.node_checks.probe import GPUReport, GPUState, NodeReport, RankReport
from pipeline.node_checks.ring import Link

# ---- the network ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(10))
def test_the_ring_measures_each_neighbour_once_and_no_node_twice_in_a_round(size):
    members = [7 * i for i in range(size)]
    rounds = ring.ring(members)
    around = {frozenset(pair) for pair in zip(members, members[1:] + members[:1], strict=True) if len(set(pair)) == 2}
    assert sorted(map(sorted, around)) == sorted(list(pair) for pairs in rounds for pair in pairs)
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)
    assert all(opener < other for pairs in rounds for opener, other in pairs)
    assert len(rounds) == (0 if size < 2 else 1 if size == 2 else 2 + size % 2)


def measured(size: int, slow: set[int], cut: set[frozenset] = frozenset(), dead: set[int] = frozenset()):
    """Return both rounds' measurements of a pretended network.

    The links of slow nodes and those in `cut` are slow; a dead node has none.
    """
    links, names = {}, {rank: f"node{rank}" for rank in range(size)}
    rounds = ring.ring(list(range(size)))
    for _ in range(ring.TURNS):
        for pair in [pair for pairs in rounds for pair in pairs]:
            speed = 1.0 if slow & set(pair) or frozenset(pair) in cut else 40.0
            link = Link(*pair, problem="no answer") if dead & set(pair) else Link(*pair, speed)
            links[pair] = ring.better(link, links.get(pair))
        rounds = ring.remeasure_pairs(links, 10.0)
    return set(diagnosis.links(names, links, 10.0))


@pytest.mark.parametrize("size", [3, 4, 5, 8, 101])
def test_a_slow_node_is_distinguished_from_its_neighbours(size):
    for node in range(min(size, 8)):
        assert measured(size, {node}) == {f"node{node}"}
    assert measured(size, set()) == set()


def test_several_slow_nodes_are_distinguished_from_those_between_them():
    assert measured(7, {3, 4}) == {"node3", "node4"}
    assert measured(7, {2, 4}) == {"node2", "node4"}  # node3 has two slow links and is measured again with another node
    assert measured(6, {1, 3, 5}) == {f"node{i}" for i in range(6)}  # every second node: none has a fast link
    assert measured(20, {0, 2, 4, 6, 19}) == {"node0", "node2", "node4", "node6", "node19"}
    assert measured(8, {2}, dead={5}) == {"node2", "node5"}


def test_both_ends_are_named_if_the_slow_one_is_unknown():
    assert measured(2, {1}) == {"node0", "node1"}
    assert measured(6, set(), {frozenset((2, 3))}) == {"node2", "node3"}


def test_without_a_bound_only_a_dead_link_counts():
    names = {0: "a", 1: "b", 2: "c"}
    links = {(0, 1): Link(0, 1, 0.001), (1, 2): Link(1, 2, 50.0), (0, 2): Link(0, 2, 50.0)}
    assert diagnosis.links(names, links, None) == {}
    links[0, 1] = Link(0, 1, problem="no answer for 20 s")
    links[0, 2] = Link(0, 2, problem="no answer for 20 s")
    assert diagnosis.links(names, links, None) == {"a": ["no network to b (no answer for 20 s) and c (no answer for 20 s)"]}


# ---- clocks -----------------------------------------------------------------------------------------------------------------


def clocks(ahead: dict[int, float], error_s: float = 1e-4, dead: tuple[tuple[int, int], ...] = ()):
    """Return measurements; `ahead` is the offset of each rank's clock from the true time."""
    links = {}
    for one, other in [pair for pairs in ring.ring(list(ahead)) for pair in pairs]:
        well = Link(one, other, 1.0, ahead[other] - ahead[one], error_s)
        links[one, other] = Link(one, other, problem="dead") if (one, other) in dead else well
    return links, diagnosis.clocks({rank: f"node{rank}" for rank in ahead}, links)


def test_the_wrong_clock_is_the_minoritys():
    assert clocks({0: 0, 1: 3, 2: -3, 3: 0})[1] == {}
    assert list(clocks({0: 0, 1: 0, 2: 60, 3: 0})[1]) == ["node2"]
    late = clocks({0: -60, 1: 0, 2: 0, 3: 0, 4: 0})[1]  # the clock that all are measured against
    assert list(late) == ["node0"] and "60.000 s behind the others'" in late["node0"][0]
    found = clocks({0: 0, 1: -60})[1]
    assert "node0" in found and "60.000 s ahead of the other's" in found["node0"][0]
    assert "60.000 s behind the other's" in found["node1"][0]


def test_clock_offsets_and_their_errors_add_up_along_the_ring():
    links, found = clocks(dict.fromkeys(range(7), 0.0) | {3: 2.0})
    assert diagnosis.clock_offsets(links)[3] == pytest.approx((2.0, 3e-4))
    assert found == {}
    links, found = clocks(dict.fromkeys(range(7), 0.0) | {2: 60.0}, dead=((1, 2),))  # the other way round
    assert diagnosis.clock_offsets(links)[2] == pytest.approx((60.0, 5e-4))
    assert list(found) == ["node2"]
    assert clocks({0: 0, 1: 0, 2: 6, 3: 0}, error_s=1.0)[1] == {}  # 2 s of error: it may be within 5 s


# ---- GPUs, versions, space, the shared folder -----------------------------------------------------------------------------


def reports(nodes: int = 3, per_node: int = 2) -> dict[int, RankReport]:
    """Return the reports of healthy nodes with H100s."""
    seen = {}
    for rank in range(nodes * per_node):
        first = rank - rank % per_node
        uuids = [f"gpu-{first + i}" for i in range(per_node)]
        gpu = GPUReport(uuids[rank % per_node], "NVIDIA H100", 85.0, 0.6, uuids)
        free = {"/tmp": 100.0, "/dev/shm": 50.0}
        states = {uuid: GPUState(0, [], "Default") for uuid in uuids}
        node = NodeReport("digest", {"python": "3.11.7", "driver": "550.1"}, free, 500.0, "", states)
        seen[rank] = RankReport(rank, 0.1, gpu, node if rank % per_node == 0 else None)
    return seen


def noted(seen: dict[int, RankReport]) -> list[str]:
    workers = WorkerGroups(tuple(sorted(seen)), (), ())
    return list(diagnosis.notes({f"n{i}": [2 * i, 2 * i + 1] for i in range(len(seen) // 2)}, seen, workers))


def judged(
    seen: dict[int, RankReport],
    nodes: int = 3,
    per_node: int = 2,
    workers: WorkerGroups | None = None,
    asked_gb: float | None = None,
) -> dict[str, list[str]]:
    ranks = {f"n{i}": [*range(i * per_node, (i + 1) * per_node)] for i in range(nodes)}
    component = ComponentConfig(nodes=nodes, gpus_per_node=per_node, gpu_memory_gb=asked_gb)
    cluster = ClusterConfig(train=component, generate=replace(component))
    return diagnosis.reports(ranks, seen, workers or WorkerGroups(tuple(range(nodes * per_node)), (), ()), cluster)


@pytest.mark.parametrize(("asked", "bad"), [(None, []), (40.0, []), (80.0, ["n0", "n1", "n2"])])
def test_gpus_smaller_than_the_described_kind_are_refused_only_if_the_recipe_asks_for_more(asked, bad):
    seen = reports()
    for report in seen.values():
        report.gpu.memory_gb = 42.3
    assert list(judged(seen, asked_gb=asked)) == bad


def break_sight(seen: dict[int, RankReport], fault: str) -> None:
    """Put a fault into the report of node n1, whose ranks are 2 and 3."""
    gpu, node = seen[3].gpu, seen[2].node
    match fault:
        case "lost":
            seen[2].gpu.visible = gpu.visible = ["gpu-2"]
        case "same":
            gpu.uuid = "gpu-2"
        case "small":
            gpu.memory_gb = 42.3
        case "kind":
            gpu.name = "NVIDIA A100"
        case "in use":
            gpu.used_gb = 20.0
        case "wrong":
            gpu.problem = "7 of the 1048576 numbers of a product of bfloat16 matrices are wrong"
        case "none":
            seen[3].gpu = seen[2].gpu = GPUReport(problem="torch finds no GPU that it can use")
        case "errors":
            node.gpus["gpu-3"] = GPUState(4, ["failure", "pending"], "Default")
        case "pending":
            node.gpus["gpu-3"] = GPUState(0, ["pending"], "Default")
        case "driver":
            node.driver = "nvidia-smi did not answer within 20 s"
        case "version":
            node.versions["driver"] = "535.2"
        case "code":
            node.code = "older"
        case "full":
            node.free_gb["/dev/shm"] = 0.002


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("lost", "it shows 1 GPUs; cluster.train.gpus_per_node is 2"),
        ("same", "rank 2 (train) and rank 3 (train) use the same GPU gpu-2"),
        ("small", "rank 3: its GPU (NVIDIA H100) has 42.3 GB; the largest GPU of train has 85.0 GB"),
        ("kind", "its GPUs (train): NVIDIA A100 and NVIDIA H100, but NVIDIA H100 on 2 others"),
        ("in use", "rank 3: 20.0 GB of its GPU gpu-3 are in use"),
        ("wrong", "rank 3: 7 of the 1048576 numbers"),
        ("none", "torch finds no GPU"),
        ("errors", "GPU gpu-3 has no spare memory row left to replace a row with errors"),
        ("pending", "GPU gpu-3 has a row of memory with errors, which a reset replaces"),
        ("driver", "nvidia-smi did not answer"),
        ("version", "driver (train): 535.2, but 550.1 on 2 others"),
        ("code", "digest of the code in pipeline/ and launch/: older, but digest on 2 others"),
        ("full", "/dev/shm: only 2 MB can be written; expected at least 16 MB"),
    ],
)
def test_a_nodes_fault_is_reported(fault, told):
    seen = reports()
    break_sight(seen, fault)
    found = judged(seen)
    assert list(found) == ["n1"]
    assert told in "; ".join(found["n1"]), found
    if fault != "none":
        assert len(found["n1"]) == 1, found


def test_memory_errors_of_other_jobs_gpus_do_not_count():
    seen = reports()
    seen[2].node.gpus["gpu-of-another-job"] = GPUState(4, ["failure"], "Default")
    assert judged(seen) == {}
    assert noted(seen) == []


def test_errors_that_the_gpu_has_repaired_are_a_note():
    """One contained error leaves the count above 0 until the driver is loaded again, on a healthy GPU."""
    seen = reports()
    seen[2].node.gpus["gpu-3"] = GPUState(4, [], "Default")
    assert judged(seen) == {}
    assert noted(seen) == ["n1: GPU gpu-3 has had 4 uncorrected memory errors since its driver was loaded"]


def test_components_that_share_gpus_need_a_mode_that_admits_two_processes():
    shared = WorkerGroups((0, 1), (2, 3), ((2,), (3,)), colocated=True)
    seen = reports(nodes=1, per_node=4)
    for rank in range(4):
        seen[rank].gpu.uuid = f"gpu-{rank % 2}"
    seen[0].node.gpus["gpu-1"] = GPUState(0, [], "Exclusive_Process")
    found = diagnosis._exclusive({"n0": [0, 1, 2, 3]}, seen, shared)
    assert found == {
        "n0": [
            "compute mode Exclusive_Process of GPU gpu-1 admits one process; two ranks share it."
            " Try nvidia-smi --compute-mode=DEFAULT"
        ]
    }
    assert diagnosis._exclusive({"n0": [0, 1, 2, 3]}, seen, replace(shared, colocated=False)) == {}


def test_little_memory_to_lock_or_share_is_noted():
    seen = reports()
    seen[0].node.lockable_gb = 0.008
    seen[2].node.free_gb["/dev/shm"] = 0.018
    assert noted(seen) == [
        "n0: only 8 MB of memory may be locked, and InfiniBand locks its buffers. If NCCL fails, set LimitMEMLOCK=infinity of"
        " slurmd, or docker run --ulimit memlock=-1",
        "n1: /dev/shm: only 18 MB can be written; NCCL takes about 20 MB there for 2 ranks that have no NVLink. Try docker run"
        " --ipc=host",
    ]


def test_components_may_have_other_versions_but_not_other_code():
    seen = reports(nodes=4)
    workers = WorkerGroups((0, 1, 2, 3), (4, 5, 6, 7), ((4, 5), (6, 7)))
    for rank in (4, 6):
        seen[rank].node.versions = {"python": "3.12.1", "driver": "550.1"}
    assert judged(seen, 4, workers=workers) == {}
    seen[6].node.versions["python"] = "3.12.2"
    found = judged(seen, 4, workers=workers)
    assert sorted(found) == ["n2", "n3"]  # both nodes of the component, since neither is the majority
    assert found["n3"] == ["python (generate): 3.12.2, but 3.12.1 elsewhere"]
    seen[0].node.code = "older"
    assert sorted(judged(seen, 4, workers=workers)) == ["n0", "n2", "n3"]


def with_versions(*versions: dict[str, str]) -> dict[int, RankReport]:
    """Return the reports of nodes of one rank each."""
    seen = reports(nodes=len(versions), per_node=1)
    for rank, found in enumerate(versions):
        seen[rank].node.versions = found
    return seen


def test_components_with_incompatible_images_are_named_with_their_images():
    cluster = ClusterConfig(
        train=ComponentConfig(container_image="/a.sqsh"), generate=ComponentConfig(container_image="/b.sqsh")
    )
    workers = WorkerGroups((0, 1), (2, 3), ((2,), (3,)))
    one = {builds.TORCH: "2.13.0 (x)", builds.CUDA: "13.0", builds.NCCL: "2.30.7", probe.NETWORK: "IB"}
    assert diagnosis.images(with_versions(one, one, one, one), workers, cluster) == ({}, [])
    for changed, told in (
        ({builds.NCCL: "2.27.5"}, "NCCL is 2.30.7 in cluster.train.container_image=/a.sqsh, 2.27.5 in"),
        ({probe.NETWORK: "Socket"}, "NCCL's network is IB in cluster.train.container_image=/a.sqsh, Socket in"),
        ({builds.TORCH: "2.12.1 (x)"}, "torch's release is 2.13.0 in cluster.train.container_image=/a.sqsh, 2.12.1 in"),
        ({builds.TORCH: "2.13.1 (x)"}, "torch's release is 2.13.0 in cluster.train.container_image=/a.sqsh, 2.13.1 in"),
        ({builds.CUDA: "12.8"}, "CUDA's major release is 13 in cluster.train.container_image=/a.sqsh, 12 in"),
    ):
        other = one | changed
        seen = with_versions(one, one, other, other)
        apart, notes = diagnosis.images(seen, workers, cluster)
        (why,) = apart.values()
        assert why == f"{told} cluster.generate.container_image=/b.sqsh"
        assert len(notes) == len({builds.TORCH, builds.CUDA} & set(changed))
        shared = diagnosis.images(seen, replace(workers, colocated=True), cluster)  # they communicate over gloo
        assert len(shared[0]) == (builds.TORCH in changed)
    assert diagnosis.images(with_versions(one, one, *[one | {builds.CUDA: "13.2"}] * 2), workers, cluster)[0] == {}
    build = one | {builds.TORCH: "2.13.0a0+nv26.07 (y)"}
    apart, (note,) = diagnosis.images(with_versions(one, one, build, build), workers, cluster)
    assert apart == {} and "2.13.0 (x) in" in note and "2.13.0a0+nv26.07 (y) in" in note
    odd = one | {probe.NETWORK: "Socket"}  # the network card's devices are missing: the node is at fault, not the image
    seen = with_versions(one, odd, one, one)
    assert diagnosis.images(seen, workers, cluster) == ({}, [])
    assert sorted(judged(seen, 4, 1, workers)) == ["n1"]


@pytest.mark.parametrize("image", [None, "/a.sqsh"])
def test_components_of_one_image_are_not_advised_to_change_it(image):
    """As when train nodes have InfiniBand and generate nodes have Ethernet."""
    one = ComponentConfig(container_image=image)
    cluster, workers = ClusterConfig(train=one, generate=replace(one)), WorkerGroups((0,), (1,), ((1,),))
    told = {builds.TORCH: "2.13.0 (x)", builds.CUDA: "13.0", builds.NCCL: "2.30.7", probe.NETWORK: "IB"}
    apart, _ = diagnosis.images(with_versions(told, told | {probe.NETWORK: "Socket"}), workers, cluster)
    assert list(apart.values()) == ["NCCL's network is IB in cluster.train, Socket in cluster.generate"]
    how = "Try env_vars: {NCCL_NET: Socket} in cluster.train and cluster.generate"
    assert diagnosis.remedy(apart, workers, cluster) == ("the components use different networks", how)
    apart, _ = diagnosis.images(with_versions(told, told | {builds.NCCL: "2.27.5"}), workers, cluster)
    assert diagnosis.remedy(apart, workers, cluster) == (
        "the components' installations do not match",
        "Try a python that has the same PyTorch, CUDA and NCCL in cluster.train and cluster.generate",
    )
    other = replace(cluster, generate=ComponentConfig(container_image="/b.sqsh"))
    assert "Try images that containers/build.sh made" in diagnosis.remedy(apart, workers, other)[1]


def test_an_installation_lacks_what_all_nodes_of_its_component_lack():
    cluster = ClusterConfig(train=ComponentConfig(container_image="/a.sqsh"), generate=ComponentConfig())
    workers, ranks = WorkerGroups((0, 1), (2, 3), ((2,), (3,))), {f"n{rank}": [rank] for rank in range(4)}
    seen = with_versions({}, {}, {}, {})
    assert diagnosis.lacks(ranks, seen, workers) == ({}, {})
    seen[0].node.lacks, seen[1].node.lacks, seen[3].node.lacks = ["no varlen"], ["no flex", "no varlen"], ["no Python.h"]
    found, of_nodes = diagnosis.lacks(ranks, seen, workers)
    assert (found, of_nodes) == ({"train": "train ranks: no varlen"}, {"n1": ["no flex"], "n3": ["no Python.h"]})
    what, advice = diagnosis.remedy(found, workers, cluster)
    assert what == "an installation lacks what its ranks need"
    assert advice == "Install or change it, or try another cluster.train.container_image"


def test_a_node_that_does_not_report_its_network_is_not_at_fault():
    told = {builds.TORCH: "2.13.0 (x)", builds.NCCL: "2.30.7", probe.NETWORK: "IB"}
    silent = {builds.TORCH: "2.13.0 (x)", builds.NCCL: "2.30.7"}
    workers = WorkerGroups((0, 1, 2, 3), (), ())
    assert judged(with_versions(told, silent, told, told), 4, 1, workers) == {}
    assert judged(with_versions(told, silent, silent, silent), 4, 1, workers) == {}
    found = judged(with_versions(told, silent, told | {probe.NETWORK: "Socket"}, told), 4, 1, workers)
    assert found == {"n2": ["NCCL's network (train): Socket, but IB on 2 others"]}
    without_nccl = {builds.TORCH: "2.13.0 (x)", probe.NETWORK: "IB"}  # an older or another image
    found = judged(with_versions(told, without_nccl, told, told), 4, 1, workers)
    assert found == {"n1": ["NCCL (train): none, but 2.30.7 on 3 others"]}


def test_an_undecidable_difference_is_reported_as_such():
    (one,), (other,) = diagnosis.outliers({"a": "1", "b": "2"}, "x").values()
    assert isinstance(one, diagnosis.Undecided) and isinstance(other, diagnosis.Undecided)
    ((sure,),) = diagnosis.outliers({"a": "1", "b": "2", "c": "1"}, "x").values()
    assert not isinstance(sure, diagnosis.Undecided)


def drivers(train: list[str], generate: list[str]) -> tuple[list[str], list[str]]:
    """Return (the nodes that are outliers, those that cannot be decided)."""
    size, first = len(train) + len(generate), len(train)
    workers = WorkerGroups(tuple(range(first)), tuple(range(first, size)), ())
    found = judged(with_versions(*({"driver": version} for version in train + generate)), size, 1, workers)
    undecided = [node for node, why in found.items() if isinstance(why[0], diagnosis.Undecided)]
    return [node for node in found if node not in undecided], undecided


def test_nodes_of_the_other_components_decide_which_of_two_drivers_is_stale():
    assert drivers(["580", "580", "580"], ["580", "570"]) == (["n4"], [])
    assert drivers(["580"], ["570", "580"]) == (["n1"], [])
    assert drivers(["580", "570"], ["580", "570"]) == ([], ["n0", "n1", "n2", "n3"])
    assert drivers(["580", "580", "580"], ["570", "590"]) == ([], ["n3", "n4"])  # they may be nodes of another kind
    assert drivers(["580", "580", "580"], ["570", "570"]) == ([], [])


def test_nodes_of_the_other_components_decide_which_of_two_networks_is_wrong():
    workers, cluster = WorkerGroups((0, 1, 2), (3, 4), ((3,), (4,))), ClusterConfig()
    told, without_card = {probe.NETWORK: "IB"}, {probe.NETWORK: "Socket"}
    seen = with_versions(told, told, told, without_card, told)
    assert list(judged(seen, 5, 1, workers)) == ["n3"]
    assert diagnosis.images(seen, workers, cluster) == ({}, [])


def test_components_on_one_node_have_gpus_of_their_own():
    seen, workers = reports(nodes=1, per_node=4), WorkerGroups((0, 1), (2, 3), ((2, 3),))
    for rank in (0, 2):
        seen[rank].node = reports()[0].node
        for report in (seen[rank], seen[rank + 1]):
            report.gpu.visible = [f"gpu-{rank}", f"gpu-{rank + 1}"]
    cluster = ClusterConfig(train=ComponentConfig(gpus_per_node=2), generate=ComponentConfig(gpus_per_node=2))
    assert diagnosis.reports({"n0": [0, 1, 2, 3]}, seen, workers, cluster) == {}
    seen[2].gpu.uuid = "gpu-1"
    found = diagnosis.reports({"n0": [0, 1, 2, 3]}, seen, workers, cluster)
    assert found == {"n0": ["rank 1 (train) and rank 2 (generate) use the same GPU gpu-1"]}
    assert diagnosis.reports({"n0": [0, 1, 2, 3]}, seen, replace(workers, colocated=True), cluster) == {}


def test_nodes_that_do_not_share_the_run_folder_are_named():
    ranks = {f"n{i}": [i] for i in range(4)}
    seen = reports(nodes=4, per_node=1)
    assert diagnosis.run_folders(ranks, seen, {}) == {}
    assert list(diagnosis.run_folders(ranks, seen, {2: "no such file"})) == ["n2"]
    for rank in (1, 2, 3):
        seen[rank].node.shared = "no such file"
    assert list(diagnosis.run_folders(ranks, seen, {})) == ["n0"]  # rank 0's own node sees another folder than all others
    assert sorted(diagnosis.run_folders({"n0": [0], "n1": [1]}, seen, {})) == ["n0", "n1"]

"""Plans of random layouts, checked entry by entry."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from launch.plan import refit_time
from pipeline.boxes import Box, Region
from pipeline.config.cluster import NetworkConfig
from pipeline.refit import balance
from pipeline.refit.plan import schedule
from pipeline.refit.schedule import RefitSchedule
from pipeline.refit.tables import LayoutTable, RefitPlan, TransferItems, layout_table

ITEMSIZE = 2
FAST_NODES, FAST_NICS = NetworkConfig(), NetworkConfig(nic_gb_per_s=50, node_gb_per_s=50)


def pieces(rng: random.Random, length: int, most: int) -> list[tuple[int, int]]:
    """Split a dimension at random. Return (offset, size) of each part."""
    cuts = sorted(rng.sample(range(1, length), min(rng.randint(0, most - 1), length - 1)))
    return [(a, b - a) for a, b in itertools.pairwise([0, *cuts, length])]


def grid(rng: random.Random, shape: tuple[int, ...], most: int) -> list[Box]:
    found = itertools.product(*(pieces(rng, length, most) for length in shape))
    return [Box(tuple(o for o, _ in part), tuple(s for _, s in part)) for part in found]


class Case:
    """Random tensors of one and two dimensions.

    Train ranks hold the boxes of a random grid, each on random ranks; generate ranks need random boxes, in units that some of
    them share.
    """

    def __init__(self, seed: int):
        rng = random.Random(seed)
        self.shapes = {
            f"t{i}": tuple(rng.randint(1, 24) for _ in range(rng.choice([1, 2, 2]))) for i in range(rng.randint(1, 8))
        }
        self.held: dict[int, list[Region]] = {rank: [] for rank in range(rng.randint(1, 6))}
        for name, shape in self.shapes.items():
            for box in grid(rng, shape, 3):
                for rank in rng.sample(sorted(self.held), rng.randint(1, len(self.held))):
                    self.held[rank].append(Region(name, box, "", 0, ()))
        self.size, self.count = rng.randint(1, 3), rng.randint(1, 4)
        first = 10
        self.engines = [list(range(first + e * self.size, first + (e + 1) * self.size)) for e in range(self.count)]
        self.wanted: list[list[tuple[Region, str]]] = []
        for _ in range(self.size):
            found = []
            for name, shape in self.shapes.items():
                boxes = grid(rng, shape, 3)
                for box in rng.sample(boxes, rng.randint(0, len(boxes))) + (
                    [Box((0,) * len(shape), shape)] * rng.randint(0, 1)
                ):
                    found.append((Region(name, box, "", 0, ()), f"unit{rng.randint(0, 3)}"))
            self.wanted.append(found)
        self.wanted[0].append(
            (Region("t0", Box((0,) * len(self.shapes["t0"]), (1,) * len(self.shapes["t0"])), "", 0, ()), "last")
        )
        per_node = rng.choice([1, 2, 4, 100])
        everyone = [*self.held, *itertools.chain(*self.engines)]
        self.nodes = {rank: f"node{rank // per_node}" for rank in everyone}
        self.bucket = rng.choice([64, 200, 1000, 100_000])
        self.network = rng.choice([FAST_NODES, FAST_NICS])

    def tables(self) -> tuple[dict[int, LayoutTable], dict[int, LayoutTable]]:
        train = {rank: layout_table(regions, self.shapes) for rank, regions in self.held.items()}
        generate = {}
        for engine in self.engines:
            for rank, wanted in zip(engine, self.wanted, strict=True):
                generate[rank] = layout_table([region for region, _ in wanted], self.shapes, [unit for _, unit in wanted])
        return train, generate

    def schedule(self) -> RefitSchedule:
        return schedule(*self.tables(), self.engines, self.shapes, ITEMSIZE, self.bucket, self.nodes, self.network)

    def plan(self) -> RefitPlan:
        return schedule(*self.tables(), self.engines, self.shapes, ITEMSIZE, self.bucket, self.nodes, self.network).plan()

    def regions(self, rank: int) -> list[Region]:
        if rank in self.held:
            return self.held[rank]
        return [region for region, _ in self.wanted[(rank - 10) % self.size]]

    def box(self, items: TransferItems, i: int, name: str) -> Box:
        dims = len(self.shapes[name])
        assert (items.offset[i, dims:] == 0).all() and (items.size[i, dims:] == 1).all()
        return Box(tuple(items.offset[i, :dims].tolist()), tuple(items.size[i, :dims].tolist()))


def size_of(items: TransferItems) -> np.ndarray:
    return items.size.prod(1) * ITEMSIZE


@pytest.fixture(scope="module", params=range(60))
def planned(request) -> tuple[Case, RefitPlan]:
    case = Case(request.param)
    return case, case.plan()


def test_the_random_cases_cover_all_kinds():
    """They include forwarding, several rounds, boxes split in either dimension, units that finish early, and shared rows."""
    found = {"relays": 0, "rounds": 0, "rows": 0, "columns": 0, "early": 0, "shared": 0}
    for seed in range(60):
        made = Case(seed).schedule()
        found["relays"] += max(map(len, made.groups)) > 2
        found["rounds"] += made.rounds > 4
        found["early"] += (made.finish < made.rounds - 3).any()
        found["shared"] += len(made.needed.box) > len(made.needed.boxes)
        for i, name in enumerate(("rows", "columns")):
            whole = np.minimum(made.held.boxes.size[made.pieces.held_box], made.needed.boxes.size[made.pieces.needed_box])
            found[name] += (made.pieces.size < whole)[:, i : i + 1].any()
    assert min(found.values()) >= 10, found


def test_counts_without_rank_plans_equal_the_rank_plans():
    for seed in range(10):
        made = Case(seed).schedule()
        whole = made.plan()
        assert whole.ranks
        for found, name in zip(made.traffic(), ("sends", "receives"), strict=True):
            for rank, part in whole.ranks.items():
                items = getattr(part, name)
                assert np.array_equal(np.bincount(items.round, size_of(items), made.rounds), found[:, rank])


def test_the_priced_messages_are_those_of_the_rank_plans():
    for seed in range(20):
        made = Case(seed).schedule()
        expected = {}
        for rank, part in made.plan().ranks.items():
            sizes = size_of(part.receives)
            for (number, source, _), rows in messages(part.receives, rank, False).items():
                expected[number, source, rank] = (sizes[rows].sum(), source in made.member)
        found = refit_time.messages(made)
        ends = zip(*(getattr(found, name).tolist() for name in ("round", "source", "target")), strict=True)
        assert dict(zip(ends, zip(found.size, found.relay, strict=True), strict=True)) == expected
        assert len(found) == len(expected)


def name_of(case: Case, made: RefitPlan, rank: int, i: int) -> str:
    """Return the tensor of a receive."""
    return case.regions(rank)[made.ranks[rank].receives.row[i]].name


def test_every_wanted_entry_is_received_once(planned):
    case, made = planned
    assert any(len(made.ranks[rank].receives) for rank in itertools.chain(*case.engines))
    for rank in itertools.chain(*case.engines):
        receives = made.ranks[rank].receives
        counts = [np.zeros(region.box.size, int) for region in case.regions(rank)]
        for i in range(len(receives)):
            region = case.regions(rank)[receives.row[i]]
            box = case.box(receives, i, region.name)
            assert region.box.intersect(box) == box
            counts[receives.row[i]][box.within(region.box)] += 1
        assert all((count == 1).all() for count in counts)


def messages(items: TransferItems, rank: int, sends: bool) -> dict[tuple[int, int, int], list[int]]:
    """Return (round, source, target) -> its items, in the message's order."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for i in range(len(items)):
        peer = int(items.peer[i])
        ends = (rank, peer) if sends else (peer, rank)
        found.setdefault((int(items.round[i]), *ends), []).append(i)
    return found


def test_both_ends_of_a_message_have_the_same_items(planned):
    _, made = planned
    sent, received = {}, {}
    for rank, part in made.ranks.items():
        for found, items, sends in ((sent, part.sends, True), (received, part.receives, False)):
            assert (np.diff(items.round) >= 0).all() and items.round.max(initial=0) < part.rounds
            for message, rows in messages(items, rank, sends).items():
                found[message] = [(items.offset[i].tolist(), items.size[i].tolist()) for i in rows]
    assert sent == received


def test_sources_hold_what_they_send(planned):
    case, made = planned
    assert any(len(part.sends) for part in made.ranks.values())
    for rank, part in made.ranks.items():
        for i in range(len(part.sends)):
            if rank in case.held:
                region = case.held[rank][part.sends.row[i]]
                box = case.box(part.sends, i, region.name)
                assert region.box.intersect(box) == box
                assert part.sends.source[i] == -1
                continue
            source = part.sends.source[i]
            assert part.sends.row[i] == -1 and part.sends.key[i] == -1
            assert part.receives.round[source] == part.sends.round[i] - 1  # after it was received
            assert np.array_equal(part.receives.offset[source], part.sends.offset[i])
            assert np.array_equal(part.receives.size[source], part.sends.size[i])


def test_both_ends_name_the_same_tensor(planned):
    """Boxes of two tensors may be equal, but a send and its receive must name the same tensor."""
    case, made = planned
    assert any(len(made.ranks[rank].receives) for rank in itertools.chain(*case.engines))
    for rank in itertools.chain(*case.engines):
        mine = made.ranks[rank]
        for (number, source, _), rows in messages(mine.receives, rank, False).items():
            peer = made.ranks[source]
            theirs = messages(peer.sends, source, True)[number, source, rank]
            for i, j in zip(rows, theirs, strict=True):
                if source in case.held:
                    name = case.held[source][peer.sends.row[j]].name
                else:
                    name = name_of(case, made, source, peer.sends.source[j])
                assert name == name_of(case, made, rank, i)


def test_rounds_are_bounded(planned):
    case, made = planned
    assert made.bucket_bytes <= case.bucket
    for part in made.ranks.values():
        for items in (part.sends, part.receives):
            assert np.bincount(items.round, size_of(items)).max(initial=0) <= made.bucket_bytes
            assert size_of(items).max(initial=0) <= made.chunk_bytes


def test_units_finish_on_all_ranks_of_an_engine_together(planned):
    case, made = planned
    assert len(case.engines) == case.count and any(case.wanted)
    for engine in case.engines:
        last: dict[str, int] = {}
        for rank, wanted in zip(engine, case.wanted, strict=True):
            receives = made.ranks[rank].receives
            for i in range(len(receives)):
                unit = wanted[receives.row[i]][1]
                last[unit] = max(last.get(unit, 0), int(receives.round[i]))
        orders = []
        for rank, wanted in zip(engine, case.wanted, strict=True):
            units = list(dict.fromkeys(unit for _, unit in wanted))
            part = made.ranks[rank]
            assert {unit: part.finish_round[i] for i, unit in enumerate(units)} == {unit: last[unit] for unit in units}
            orders.append([units[i] for i in part.order])
            assert sorted(orders[-1]) == sorted(units)
            assert (np.diff(part.finish_round[part.order]) >= 0).all()
        for one, other in itertools.combinations(orders, 2):
            assert [unit for unit in one if unit in other] == [unit for unit in other if unit in one]


def test_each_box_is_hashed_once(planned):
    """The train ranks' sends with a key cover each distinct box, and each copy of it, once; receives have the same keys."""
    case, made = planned
    boxes: dict[int, tuple[str, Box]] = {}
    for rank in itertools.chain(*case.engines):
        receives = made.ranks[rank].receives
        for i in range(len(receives)):
            region = case.regions(rank)[receives.row[i]]
            key = int(receives.key[i])
            assert boxes.setdefault(key, (region.name, region.box)) == (region.name, region.box)
    copies: Counter[tuple[str, Box]] = Counter()  # a rank may need a box more than once
    for rank in case.engines[0]:
        copies |= Counter((region.name, region.box) for region in case.regions(rank))
    assert sorted(boxes) == list(range(made.keys)) and Counter(boxes.values()) == copies
    assert [list(case.shapes)[i] for i in made.key_tensor] == [boxes[key][0] for key in range(made.keys)]
    counts = {key: np.zeros(box.size, int) for key, (_, box) in boxes.items()}
    for rank in case.held:
        sends = made.ranks[rank].sends
        for i in np.flatnonzero(sends.key >= 0):
            name, box = boxes[int(sends.key[i])]
            assert case.held[rank][sends.row[i]].name == name
            counts[int(sends.key[i])][case.box(sends, i, name).within(box)] += 1
    assert all((count == 1).all() for count in counts.values())


def test_a_box_that_a_rank_needs_twice_is_received_and_hashed_twice():
    """Gemma 4's keys are values too."""
    made = one_tensor({0: [(0, 8)]}, {1: [(2, 4), (2, 4), (0, 8)], 2: [(2, 4)]}, [[1, 2]], 1000).plan()
    receives = {rank: made.ranks[rank].receives for rank in (1, 2)}
    assert made.keys == 3 and set(receives[1].row) == {0, 1, 2}
    assert len(set(receives[1].key)) == 3 and set(receives[2].key) <= set(receives[1].key)
    assert {key for key in made.ranks[0].sends.key if key >= 0} == {0, 1, 2}


# ---- what cannot be planned


def one_tensor(
    held: dict[int, list[tuple[int, int]]], wanted: dict[int, list[tuple[int, int]]], engines: list[list[int]], bucket: int
) -> RefitSchedule:
    """Plan a tensor "w" of 8 rows and 4 columns, with the rows that ranks hold and need as (first, last + 1)."""
    shapes = {"v": (3,), "w": (8, 4)}

    def rows(parts: list[tuple[int, int]], unit: list[str] | None = None) -> LayoutTable:
        regions = [Region("w", Box((a, 0), (b - a, 4)), "", 0, ()) for a, b in parts]
        return layout_table(regions, shapes, unit and unit * len(regions))

    train = {rank: rows(parts) for rank, parts in held.items()}
    generate = {rank: rows(parts, ["unit"]) for rank, parts in wanted.items()}
    nodes = dict.fromkeys([*train, *generate], "node")
    return schedule(train, generate, engines, shapes, ITEMSIZE, bucket, nodes, FAST_NICS)


def test_rows_that_no_train_rank_holds_are_named():
    with pytest.raises(ValueError, match=r"hold 16 of the 24 entries of 'w' \[2:8, 0:4\], which generate ranks \[6, 7\] need"):
        one_tensor({0: [(0, 4)], 1: [(6, 8)]}, {5: [(0, 4)], 6: [(2, 8)], 7: [(2, 8)]}, [[5, 6, 7]], 1000)


def test_train_boxes_that_overlap_are_named():
    message = r"'w' that overlap .*: \[0:4, 0:4\] on ranks \[0\], \[3:8, 0:4\] on ranks \[1, 2\]"
    with pytest.raises(ValueError, match=message):
        one_tensor({0: [(0, 4)], 1: [(3, 8)], 2: [(3, 8)]}, {5: [(0, 8)]}, [[5]], 1000)


def test_engines_must_be_alike():
    with pytest.raises(ValueError, match=r"generate rank 8, rank 1 of engine 1, .* rank 6 of engine 0"):
        one_tensor({0: [(0, 8)]}, {5: [(0, 4)], 6: [(4, 8)], 7: [(0, 4)], 8: [(3, 8)]}, [[5, 6], [7, 8]], 1000)
    with pytest.raises(ValueError, match="engine 1 has 1 ranks, engine 0 has 2"):
        one_tensor({0: [(0, 8)]}, {5: [(0, 4)], 6: [(4, 8)], 7: [(0, 4)]}, [[5, 6], [7]], 1000)


def test_a_bucket_that_is_too_small_is_an_error():
    with pytest.raises(ValueError, match=r"policy.generation.refit_cfg.bucket_bytes: got 3; expected at least 4"):
        one_tensor({0: [(0, 8)]}, {5: [(0, 8)]}, [[5]], 3)
    assert one_tensor({0: [(0, 8)]}, {5: [(0, 8)]}, [[5]], 4).rounds == 16  # two entries a round


# ---- balance


def test_loads_are_minimal():
    """For random overlapping holder sets, the largest load equals the lower bound of `floor`."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        ranks = int(rng.integers(2, 12))
        sets = [np.sort(rng.choice(ranks, rng.integers(1, ranks + 1), replace=False)) for _ in range(rng.integers(1, 12))]
        demand = rng.integers(0, 1000, len(sets)).astype(float)
        shares, load = balance.send_shares(sets, demand, ranks)
        found = np.zeros(ranks)
        for members, share, asked in zip(sets, shares, demand, strict=True):
            assert share.min() >= 0 and share.sum() == pytest.approx(asked)
            found[members] += share
        assert found == pytest.approx(load)
        assert load.max() <= 1.01 * balance.lower_bound(sets, demand, load)


def test_the_floor_accounts_for_data_that_few_ranks_hold():
    sets = [np.array([0]), np.array([0, 1, 2, 3])]
    shares, load = balance.send_shares(sets, np.array([60.0, 40.0]), 4)
    assert load == pytest.approx([60, 40 / 3, 40 / 3, 40 / 3])
    assert balance.lower_bound(sets, np.array([60.0, 40.0]), load) == 60
    assert shares[1] == pytest.approx([0, 40 / 3, 40 / 3, 40 / 3])


@pytest.mark.parametrize(
    ("per_node", "network", "sent", "expected"),
    [
        (4, FAST_NODES, 1.0, [[0, 1, 2, 3], [4, 5, 6, 7]]),  # within nodes
        (4, FAST_NICS, 1.0, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        (1, FAST_NODES, 1.0, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        (1, FAST_NODES, 2.0, [[0, 1], [2, 3], [4, 5], [6, 7]]),  # the train ranks would need twice as long
        (1, FAST_NODES, 3.5, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, FAST_NODES, 4.0, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (1, FAST_NODES, 100.0, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_sharing_groups(per_node, network, sent, expected):
    """Plan for eight engines of one rank, each of which receives 8 bytes; `sent`: by the busiest train rank for one engine."""
    nodes = {rank: f"node{rank // per_node}" for rank in range(8)}
    assert balance.sharing_groups([[rank] for rank in range(8)], nodes, network, sent, 8.0) == expected


def test_engines_forward_only_if_all_their_ranks_do():
    engines, nodes = [[0, 1], [2, 3], [4, 5], [6, 7]], {0: "a", 1: "b", 2: "a", 3: "b", 4: "a", 5: "c", 6: "c", 7: "b"}
    assert balance.sharing_groups(engines, nodes, FAST_NODES, 1.0, 8.0) == [[0, 1], [2], [3]]


def even(train: int, engines: int, size: int, nodes: int, network: NetworkConfig) -> RefitSchedule:
    """Return 64 units of 32 kB that all train ranks hold; an engine's ranks each need equal parts of all."""
    shapes = {f"t{i}": (16, 1024) for i in range(64)}
    whole = layout_table([Region(name, Box((0, 0), shape), "", 0, ()) for name, shape in shapes.items()], shapes)
    rows = 16 // size
    parts = [
        layout_table([Region(name, Box((g * rows, 0), (rows, 1024)), "", 0, ()) for name in shapes], shapes, list(shapes))
        for g in range(size)
    ]
    members = [list(range(train + e * size, train + (e + 1) * size)) for e in range(engines)]
    generate = {rank: parts[g] for engine in members for g, rank in enumerate(engine)}
    held, places = dict.fromkeys(range(train), whole), {rank: f"node{rank % nodes}" for rank in range(train + engines * size)}
    return schedule(held, generate, members, shapes, ITEMSIZE, 64 << 10, places, network)


@pytest.mark.parametrize(
    ("train", "engines", "size", "groups"),
    [(8, 8, 1, 8), (4, 2, 4, 1), (6, 5, 2, 3), (16, 2, 2, 2), (3, 7, 1, 3), (15, 16, 1, 16)],
)
def test_all_sources_are_always_busy(train, engines, size, groups):
    made = even(train, engines, size, 1000, FAST_NICS)
    # engines forward to each other if fewer train ranks would need longer than a generate rank
    assert len(made.groups) == groups
    out, into = made.traffic()
    busiest = max(out.sum(0).max(), into.sum(0).max())
    assert busiest <= 1.05 * made.lower_bound_bytes
    assert made.lower_bound_bytes == max(64 * 32768 / size, 64 * 32768 * groups / train)
    assert (out[: made.round.max() + 1, :train] > 0).mean() > 0.9
    assert sum(max(a.max(), b.max()) for a, b in zip(out, into, strict=True)) < 1.35 * busiest  # no rank waits long
    sources = {rank: set() for rank in made.member}
    sent = made.train_messages()
    for source, target in zip(sent.source.tolist(), sent.target.tolist(), strict=True):
        sources[target].add(source)
    assert max(map(len, sources.values())) <= -(-train // (engines * size)) + 2


def test_a_shared_byte_leaves_the_train_ranks_once():
    made = even(2, 4, 2, 1, FAST_NODES)
    assert made.groups == [[0, 1, 2, 3]]
    out, into = made.traffic()
    assert out[:, :2].sum() == 64 * 32768
    assert (into[:, 2:].sum(0) == 32 * 32768).all()
    relayed = out[:, 2:].sum(0)
    assert relayed.max() < 1.1 * relayed.mean() == pytest.approx(1.1 * 0.75 * 32 * 32768)  # the first engines rotate


def test_units_come_in_the_models_order():
    made = even(4, 1, 2, 1, FAST_NODES)
    assert made.needed.units == [f"t{i}" for i in range(64)]
    finish = made.finish[:, 0]
    assert (np.diff(finish) >= -1).all() and finish[0] <= 2 and finish[-1] == made.rounds - 1


def test_pipeline_stages_are_busy_at_once_on_either_side():
    """Plan four units: train ranks 0 and 1 hold two each; generate ranks 2 and 3 need two each, paired differently."""
    shapes = dict.fromkeys("abcd", (64, 1024))

    def of(names: str, units: bool) -> LayoutTable:
        regions = [Region(name, Box((0, 0), (64, 1024)), "", 0, ()) for name in names]
        return layout_table(regions, shapes, list(names) if units else None)

    nodes = dict.fromkeys(range(4), "node")
    for held in (("ab", "cd"), ("ac", "bd")):
        train = {rank: of(names, False) for rank, names in enumerate(held)}
        generate = {2: of("ab", True), 3: of("cd", True)}
        made = schedule(train, generate, [[2, 3]], shapes, ITEMSIZE, 32 << 10, nodes, FAST_NICS)
        out, into = made.traffic()
        busy = np.concatenate([out[:, :2], into[:, 2:]], 1) > 0
        assert busy[:-1].all() and made.rounds <= 10


def test_tensors_that_stay_in_float32_count_as_float32():
    name, box = "gate.e_score_correction_bias", Box((0,), (1000,))
    shapes, regions = {name: box.size}, [Region(name, box, name, 0, (1,))]
    train, generate = {0: layout_table(regions, shapes)}, {1: layout_table(regions, shapes, ["gate"])}
    made = schedule(train, generate, [[1]], shapes, 2, 256, {0: "a", 1: "b"}, FAST_NICS)
    out, into = made.traffic()
    assert made.lower_bound_bytes == out.sum() == into.sum() == 4000
    sends = made.plan().ranks[0].sends
    assert np.bincount(sends.round, 4 * sends.size.prod(1)).max() <= 256

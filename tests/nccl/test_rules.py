"""Each of NCCL's rules: operations that follow it succeed, and operations that break it are refused by name."""

import importlib.util
import json
import re

import pytest

from tests import fork_server
from tests.nccl import ranks
from tests.nccl.group import HOST, declared_device


@pytest.fixture(scope="module")
def raised(tmp_path_factory) -> dict[str, list[str]]:
    """Return each scenario's error, by rank."""
    folder = tmp_path_factory.mktemp("rules")
    fork_server.run(ranks.play, (str(folder),), ranks.SIZE)
    by_rank = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks.SIZE)]
    return {name: [one[name] for one in by_rank] for name in by_rank[0]}


@pytest.mark.parametrize("scenario", ranks.LASTING[:5], ids=lambda scenario: scenario.__name__)
def test_valid_operations_succeed(raised, scenario):
    assert raised[scenario.__name__] == ["", "", ""]


def test_a_communicator_waits_for_all_ranks(raised):
    """As when a refit's first batch has no messages for the ranks of a reward model."""
    *waiting, absent = raised["first_a_batch_of_some"]
    assert absent == ""
    for rank, words in enumerate(waiting):
        assert f"the communicator of ranks 0, 1, 2 is not made: after 2 s rank {rank} still waits" in words
        assert "for rank 2." in words


def test_a_group_of_nccl_alone_refuses_host_tensors(raised):
    assert raised["host_tensors_without_a_carrier"] == ["RuntimeError: No backend type associated with device type cpu"] * 3


def test_two_ranks_on_one_device_are_refused(raised):
    assert len(raised["one_device_twice"]) == ranks.SIZE
    for words in raised["one_device_twice"]:
        assert "ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 4 of here" in words


@pytest.mark.parametrize(
    ("scenario", "number", "told"),
    [
        ("different_collectives", 1, ["allreduce of SUM, float32[4]"] * 2 + ["broadcast of root 0, float32[4]"]),
        ("different_numbers", 2, ["float32[4]", "float32[5]", "float32[4]"]),
        ("different_types", 1, ["float32[4]", "bfloat16[4]", "float32[4]"]),
        ("different_splits", 1, ["sends [2, 2, 2]", "sends [4, 2, 0]", "sends [2, 2, 2]"]),
    ],
)
def test_all_ranks_must_call_the_same_collectives(raised, scenario, number, told):
    assert len(raised[scenario]) == ranks.SIZE
    for words in raised[scenario]:
        before, *operations = re.split(r"rank \d: ", words)
        assert f"the operations of the communicator of ranks 0, 1, 2 differ in number {number}: " in before
        assert all(part in operation for part, operation in zip(told, operations, strict=True)), words


def test_a_message_outside_a_batch_makes_a_pairs_communicator(raised):
    sender, *others = raised["a_send_without_its_pair"]
    assert "the communicator of ranks 0, 1 is not made" in sender and "for rank 1." in sender
    assert others == ["", ""]


def test_messages_are_matched_by_order(raised):
    _, receiver, _ = raised["messages_by_tag"]
    assert "rank 0 sends float32[3], where rank 1 receives float32[4]" in receiver


def test_a_pair_that_sends_first_at_both_ends_deadlocks(raised):
    *pair, other = raised["both_send_first"]
    assert other == ""
    for words in pair:
        assert "the operations of the communicator of ranks 0, 1 do not end after 2 s" in words
        assert "rank 0: operation 1, send to rank 1 of float32[1]; rank 1: operation 1, send to rank 0" in words


def test_batches_and_collectives_of_a_group_run_in_one_order(raised):
    assert len(raised["a_batch_before_or_after_a_collective"]) == ranks.SIZE
    for words in raised["a_batch_before_or_after_a_collective"]:
        assert "rank 0: operation 2, send to rank 1 of float32[2]; rank 1: operation 2, allreduce" in words


def test_the_modules_of_host_exist():
    assert [name for name in HOST if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize(
    ("visible", "local_rank", "device"),
    [("", 3, "train:3"), ("2", 0, "2"), ("4,5", 1, "5"), ("4,5", 2, "4")],
)
def test_a_rank_declares_the_device_that_the_pipeline_uses(monkeypatch, visible, local_rank, device):
    environment = {"NODE": "here", "COMPONENT": "train", "LOCAL_RANK": str(local_rank)}
    for name, value in environment.items():
        monkeypatch.setenv(f"HETSTEP_{name}", value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert declared_device() == ("here", device)

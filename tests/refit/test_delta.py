"""Deltas are lossless for any bits, never larger than the full tensor, and never applied to another base."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from pipeline.refit.delta import BITMAP, FULL, GAPS8, GAPS16, DeltaBases, decode, encode, encoded_bytes, scatter
from pipeline.refit.digest import RefitError
from pipeline.refit.endpoints import padded_size
from pipeline.refit.transfer import StageTimer
from tests.refit import ranks
from tests.refit.ranks import AWKWARD, GENERATE, TRAIN, World

INTEGERS = {2: torch.int16, 4: torch.int32}
KINDS = (torch.bfloat16, torch.float32)
ONE_ENGINE = ((2, 3),)


def pair(count: int, places: torch.Tensor, precision: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (base, new) of random bits that differ in one bit at these places.

    They include NaNs with payloads and both zeros.
    """
    rng = torch.Generator().manual_seed(count)
    bits = torch.randint(-(2**15), 2**15, (count,), generator=rng).to(INTEGERS[precision.itemsize])
    bits[: count // 3] = 0
    new = bits.clone()
    new[places] ^= -(2 ** (8 * precision.itemsize - 1))  # the sign: 0.0 and -0.0 compare as equal
    return bits.view(precision), new.view(precision)


def through(base: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return (the receiver's tensor, the mode, the bytes)."""
    out = torch.full((padded_size(new.nbytes) + 64,), 0xA5, dtype=torch.uint8, device=new.device)
    code = encode(new, base, out)
    size = encoded_bytes(code, new.numel(), new.itemsize)
    assert size <= padded_size(new.nbytes)
    assert (out[size:] == 0xA5).all(), "wrote behind its end"
    places, values = decode(out[:size].clone(), code, new.numel(), new.dtype)
    if places is None:
        return values, code % 4, size
    got = base.clone()
    scatter(got, places, values)
    return got, code % 4, size


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(INTEGERS[one.itemsize]), other.view(INTEGERS[other.itemsize]))


@pytest.mark.parametrize("precision", KINDS, ids=str)
@pytest.mark.parametrize("share", [0, 1e-5, 1e-4, 0.001, 0.01, 0.05, 0.2, 0.5, 0.93, 1])
@pytest.mark.parametrize("count", [1, 7, 64, 1001, 200_003])
def test_any_share_of_changes_arrives_bit_by_bit(count, share, precision):
    places = (torch.rand(count, generator=torch.Generator().manual_seed(1)) < share).nonzero().view(-1)
    base, new = pair(count, places, precision)
    got, _, _ = through(base, new)
    assert same_bits(got, new)


@pytest.mark.parametrize(
    ("count", "every", "mode"),
    [
        (100, 100, GAPS8),
        (100_000, 100_000, GAPS16),
        (100_000, 100, GAPS8),
        (100_000, 3000, GAPS16),
        (1 << 20, 300_000, GAPS16),
        (100_000, 4, BITMAP),
        (100_000, 1, FULL),
    ],
)
def test_the_smallest_encoding_is_chosen(count, every, mode):
    base, new = pair(count, torch.arange(every - 1, count, every), torch.bfloat16)
    got, taken, size = through(base, new)
    assert same_bits(got, new) and taken == mode
    changed = count // every
    fewest = {
        GAPS8: 3 * changed + 3 * count // 256,
        GAPS16: 4 * changed + 4 * count // 65536,
        BITMAP: count // 8 + 2 * changed,
        FULL: 2 * count,
    }
    assert size <= min(fewest.values()) + 16


def test_gaps_at_their_limits_are_encoded():
    for first, gap in itertools.product((0, 254, 255, 256, 65535, 65536), (254, 255, 256, 257, 511, 512, 65535, 65536, 131072)):
        places = torch.tensor([first, first + gap + 1])
        base, new = pair(300_000, places, torch.bfloat16)
        got, mode, size = through(base, new)
        assert same_bits(got, new) and mode in (GAPS8, GAPS16) and size < 2000


def test_unchanged_tensors_take_no_bytes():
    base, new = pair(1000, torch.tensor([], dtype=torch.int64), torch.bfloat16)
    assert through(base, new)[2] == 0


def test_places_are_found_in_any_strides():
    base = torch.zeros(5, 6, 14).permute(1, 0, 2)[:, 1:4, 3:]
    expected = base.clone(memory_format=torch.contiguous_format)
    places = torch.tensor([0, 10, 11, 100, 197])
    expected.view(-1)[places] = torch.arange(1.0, 6.0)
    scatter(base, places, torch.arange(1.0, 6.0).to(torch.bfloat16))
    assert torch.equal(base, expected)


@pytest.mark.parametrize("code", [5 * 4 + FULL, 11 * 4 + GAPS8, -4 + BITMAP])
def test_an_unknown_code_is_refused(code):
    with pytest.raises(RefitError, match="of 10 entries"):
        encoded_bytes(code, 10, 2)


@pytest.mark.parametrize("mode", [GAPS8, GAPS16, BITMAP])
def test_places_of_another_item_are_refused(mode):
    body = torch.full((encoded_bytes(3 * 4 + mode, 10, 2),), 0xFF, dtype=torch.uint8)
    with pytest.raises(RefitError, match="3 entries"):
        decode(body, 3 * 4 + mode, 10, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0, 0.001, 0.05, 0.5, 1])
def test_a_gpu_encodes_the_same(share):
    places = (torch.rand(100_001, generator=torch.Generator().manual_seed(1)) < share).nonzero().view(-1)
    base, new = pair(100_001, places, torch.bfloat16)
    got, mode, size = through(base.cuda(), new.cuda())
    assert same_bits(got.cpu(), new) and (mode, size) == through(base, new)[1:]


# ---- bases ------------------------------------------------------------------------------------------------------------


def test_a_base_is_valid_until_a_refit_fails():
    bases = DeltaBases()
    assert bases.begin() == 0
    bases.done()
    assert bases.begin() == 1
    assert bases.begin() == 0, "the second never got to its end"
    bases.done()
    assert bases.begin() == 3


def three_refits(world: World, folder: Path, failing: str) -> None:
    """Fail the second refit at one end after all data has arrived; the other end does not know."""
    made = ranks.backends(AWKWARD, ONE_ENGINE, torch.bfloat16, torch.bfloat16, world.device)
    plan = ranks.planned(AWKWARD, made, ONE_ENGINE, torch.bfloat16, 1 << 16)
    own = made[world.rank]
    refit = ranks.prepared(world, own, torch.bfloat16, "delta", plan)
    outcome = "done"
    for version in (1, 2, 3):
        full = ranks.weights(AWKWARD, version, torch.bfloat16)
        if world.rank in TRAIN:
            own.fill(full)
        fails = version == 2 and (world.rank in TRAIN) == (failing == "train")
        with pytest.raises(OSError) if fails else nullcontext(), patched(fails):
            try:
                report = ranks.transfer(world, refit, own)
            except RefitError as error:
                outcome = str(error)
                break
        own.finished = []
    else:
        ranks.agree(world, AWKWARD, plan, report, folder, version)
        if world.rank in GENERATE:
            own.check(full)
    (folder / f"outcome-{world.rank}").write_text(outcome)
    os._exit(0)


@contextmanager
def patched(fails: bool) -> Iterator[None]:
    """Fail at the latest possible moment."""
    with pytest.MonkeyPatch.context() as patch:
        if fails:

            def fail(clock):
                raise OSError

            patch.setattr(StageTimer, "seconds", fail)
        yield


@pytest.mark.parametrize("failing", ["train", "generate"])
def test_after_a_failure_at_one_end_no_delta_is_sent_on_the_others_base(failing, tmp_path):
    ranks.run_to_the_end(three_refits, tmp_path, failing)
    outcomes = {rank: path.read_text() for rank in range(4) if (path := tmp_path / f"outcome-{rank}").exists()}
    if failing == "train":
        assert outcomes == dict.fromkeys(range(4), "done")  # everything was sent in full
    else:
        assert set(outcomes) == set(GENERATE)
        assert all("with base 2, this rank" in outcome and "with base none" in outcome for outcome in outcomes.values()), (
            outcomes
        )

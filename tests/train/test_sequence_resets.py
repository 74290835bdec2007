"""Check that states start anew in each sequence, and that sequences of similar lengths share a call."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from pipeline.train import sequence_resets
from pipeline.train.sequence_bounds import Packing
from pipeline.train.sequence_resets import balance_sequences
from tests.train import attention_models, cases, ranks
from tests.train.ranks import Layout

pytestmark = pytest.mark.usefixtures("realm")


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([100, 30, 80, 20], [[0, 2], [1, 3]]),
        ([5, 64, 1], [[1, 0, 2]]),
        ([400, 300, 299, 65, 48], [[0, 1], [2], [3], [4]]),
    ],
)
def test_similar_lengths_share_a_call(lengths, groups):
    assert sequence_resets.similar(lengths) == groups


class Layer(nn.Module):
    """A layer with a causal convolution, which counts its calls and padding."""

    def __init__(self):
        super().__init__()
        self.mixer, self.seen = nn.Module(), []
        self.mixer.conv = nn.Conv1d(4, 4, 3, padding=2, groups=4)
        self.mixer.forward = self.mix

    def mix(self, hidden_states):
        self.seen.append(hidden_states.shape[:2])
        return self.mixer.conv(hidden_states.transpose(1, 2))[..., : hidden_states.size(1)].transpose(1, 2)

    def forward(self, hidden, **kwargs):
        return self.mixer.forward(hidden_states=hidden)


class Body(nn.Module):
    """A model of one layer."""

    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, hidden, **kwargs):
        return self.layer(hidden)


def test_each_sequence_is_computed_alone():
    body = Body()
    layer = body.layer
    lengths = (70, 3, 100, 90)
    hidden = torch.randn(1, sum(lengths), 4)
    alone = torch.cat([layer(part[None])[0] for part in hidden[0].split(lengths)])
    together = layer(hidden)[0]
    layer.seen.clear()
    assert sequence_resets.reset_sequences(body, [layer])
    packing = Packing.of_lengths(lengths, torch.tensor([0, *lengths]).cumsum(0).int())
    assert (body(hidden, packing=packing)[0] - alone).abs().max() < 1e-6
    assert layer.seen == [(2, 100), (1, 70), (1, 3)]
    assert (together - alone).abs().max() > 0.1  # without resets
    with pytest.raises(ValueError, match="did not get `packing`"):
        body(hidden)
    with pytest.raises(ValueError, match="for 263 packed tokens"):
        body(hidden[:, 1:], packing=packing)


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_recomputed_layers_have_the_packing_of_their_own_batch(name, tmp_path):
    attention_models.write(tmp_path, [name])
    batches = [cases.pack([0, 3, 4]), cases.pack([3, 4, 0])]  # as many tokens, other boundaries
    found = []
    for on in (False, True):
        trained = ranks.backend(cases.policy(tmp_path / name), activation_checkpointing=on)
        outputs = [trained._outputs(batch, trained._model) for batch in batches]
        sum(out.logprobs.sum() for out in outputs).backward()  # after both forward passes
        found.append([p.grad for p in trained._model.parameters()])
    assert found[0]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_sequences_are_shared_by_tokens():
    assert balance_sequences([5, 9, 3, 2], 2) == [[1], [0, 2, 3]]
    assert balance_sequences([4], 3) == [[0], [], []]


def over_ranks(names, layout: Layout, folder) -> None:
    for name in names:
        trained = ranks.backend(cases.policy(folder / name), layout, activation_checkpointing=name == "bamba")
        ranks.check_against_eager(trained, layout, folder / name, 3e-6)


CP2 = Layout(1, 1, context=2)
LAYOUTS = {  # tensor parallelism: test_hybrids.py
    Layout(2, 1): ("mamba",),  # names its mixers among the modules that are not split, inside its layers
    CP2: ("nemotron_h", "bamba", "lfm2", "qwen3_5_text"),
    Layout(1, 1, context=4): ("nemotron_h", "qwen3_next"),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_states_over_ranks(layout, tmp_path):
    attention_models.write(tmp_path, LAYOUTS[layout])
    ranks.run(functools.partial(over_ranks, LAYOUTS[layout]), layout, tmp_path)


@pytest.fixture
def one_thread():
    """Compute with one thread: with two, log-probs of qwen3_next, which has experts, differ by 5e-7."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_padding_on_the_right_changes_no_earlier_token(tmp_path, one_thread):
    """Compute the longest sequence alone and beside others, of every kind of state."""
    names = [name for name in attention_models.hybrids() if "mo" not in name]
    assert len(names) > 1
    attention_models.write(tmp_path, names)
    longest = max(range(len(cases.LENGTHS)), key=lambda i: cases.LENGTHS[i])
    batch = cases.pack([longest, 0, 3])
    changed = dataclasses.replace(batch, tokens=batch.tokens.clone())
    changed.tokens[cases.LENGTHS[longest] :] = (batch.tokens[cases.LENGTHS[longest] :] + 1) % cases.VOCABULARY
    for name in names:
        trained = ranks.backend(cases.policy(tmp_path / name))
        first, second = (out.logprobs[: cases.LENGTHS[longest]] for out in trained.forward([batch, changed]))
        assert torch.equal(first, second), name
        short = trained.forward([cases.pack([0])])[0].logprobs
        beside = trained.forward([cases.pack([longest, 0])])[0].logprobs[cases.LENGTHS[longest] :]
        assert (short - beside).abs().max() < 1e-5, name

"""Golden values of this folder: outputs of peers' own code for given inputs.

To make a value again, check out the repository at the file's `commit`, and import the source file; imports besides torch that
its functions do not use (Ray, engines, data) can be empty modules. Set torch's default dtype to float64, since some functions
make tensors. Call the function with the batch, as the docstring of the formula in `ours.py` says, and take the gradient of the
loss with `torch.autograd.grad`. verl's `response_mask` is `token_mask * sample_mask`.

The head of a file has `repository`, `commit`, `file`, and the `torch` version and `dtype` that the peer's code ran with.
`inputs` has batches by name, and each of `cases` the `function`, the `batch` and the `arguments`, which are ours; `theirs` has
the peer's where their names differ. `loss`, `gradient`, `values`, `advantages`, `returns`, `sample_mask` and `metrics` are what
came back.

Inputs were drawn once with a fixed seed and rounded to a few decimals. Rows are sequences, padded to the longest with zeros;
column t is of token t. `token_mask` is 1 where a token counts, `sample_mask` 0 for a sequence that the loss leaves out. The
batches are

    varied    sequences of 3 to 14 tokens, with a tool's tokens in the middle of one, one that is left out, advantages of both
              signs, and ratios beyond both bounds
    extreme   log-probs down to -60, ratios up to e^25, and log-ratios to the reference beyond the clamp of 20
    one       a single sequence with a single counted token
    several   three rewards of the answers to four prompts, in groups of two to four; some do not vary in a group
    chunks    tokens in chunks of one to several, and one chunk of which the policy is sure
    texts     one text in the tokens of two vocabularies, with whole distributions
    opposed   two rewards whose sum does not vary in the first group
    turns     rewards of the turns of episodes, which have one to four turns; no episode is the only one with a turn
    groups    rewards of one prompt each: all equal, one and two right of 16, one wrong of 4, two answers, one answer, a model's
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
PEERS = {"nemo_rl": "NeMo-RL", "verl": "verl", "trl": "TRL", "dpca": "On-Policy-Distill", "rllm": "rLLM"}
_EXPECTED = ("loss", "gradient", "values", "advantages", "returns", "sample_mask")


@dataclass(frozen=True)
class Golden:
    """One case of a file: a peer's function, its inputs and its outputs."""

    kind: str  # the file's name without the peer: policy_loss, gae, ...
    peer: str
    commit: str
    function: str
    formula: str
    batch: str  # which of the file's inputs
    arguments: dict[str, Any]  # ours; `theirs` in the file has the peer's where their names differ
    inputs: dict[str, Any]
    expected: dict[str, torch.Tensor]  # float64, by name
    more: dict[str, Any]  # the case's other entries

    @property
    def name(self) -> str:
        return f"{self.peer}: {self.formula}" + (f", {self.batch}" if self.batch else "")


@cache
def goldens() -> tuple[Golden, ...]:
    return tuple(golden for path in sorted(FOLDER.glob("*.json")) for golden in _read(path))


def _read(path: Path) -> list[Golden]:
    content = json.loads(path.read_text())
    peer = next(prefix for prefix in PEERS if path.stem.startswith(prefix))
    found = []
    for case in content["cases"]:
        batch = case.pop("batch", "")
        inputs = content["inputs"][batch] if batch else content["inputs"]
        names = [name for name in _EXPECTED if name in case and not (name == "advantages" and "loss" in case)]
        expected = _flat({name: case.pop(name) for name in names})  # a loss's advantages are an input
        expected |= _flat({"metrics": case.pop("metrics", {})})
        found.append(
            Golden(
                kind=path.stem.removeprefix(f"{peer}_"),
                peer=PEERS[peer],
                commit=content["commit"],
                function=case.pop("function"),
                formula=case.pop("formula"),
                batch=batch,
                arguments=case.pop("arguments"),
                inputs=inputs,
                expected=expected,
                more=case,
            )
        )
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return {"values": {"two": [..]}} as {"values of two": tensor}."""
    found = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{name} of ")
        else:
            found[prefix + name] = torch.tensor(value, dtype=torch.float64)
    return found

"""Frozen parameters with FSDP2: their weights stay equal to the bit, and the gradients of the others do not change."""

import functools
import json

import pytest
from safetensors.torch import load_file

from pipeline.config import TokenizerConfig
from pipeline.train.hf_export import export_checkpoint
from tests.end_to_end.runs import ROOT
from tests.problems import refused
from tests.train import cases, frozen, ranks
from tests.train.ranks import Layout

pytestmark = pytest.mark.usefixtures("realm")
ONE = Layout(1, 1)


def changes(families: tuple[str, ...]) -> dict[str, list[dict]]:
    """Return the changes of each check. torch multiplies no groups of Mixtral's 44 columns in bfloat16."""
    half = {family: {"precision": "float32" if family == "mixtral" else "bfloat16"} for family in families}
    return {family: [{}, {"recompute": True}, half[family]] for family in families} | {"qwen3_values": [{}]}


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_one_rank(models, family):
    frozen.families(changes((family,)), ONE, models)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout, families",
    [
        (Layout(2, 1), ("qwen2", "qwen3_tied", "qwen3_moe")),
        (Layout(1, 2), ("qwen2", "qwen3_tied")),
        (Layout(1, 2, sequence=True), ("qwen2", "qwen3_tied")),
        (Layout(1, 1, context=2), ("qwen2", "qwen3_moe")),
        (Layout(2, 1, replicas=2), ("qwen2", "qwen3_moe")),
        (Layout(2, 1, expert=2), ("mixtral",)),
    ],
    ids=lambda case: case.name if isinstance(case, Layout) else " ".join(case),
)
def test_two_ranks(models, layout, families):
    of_families = changes(families)
    if layout.expert > 1:  # it has no experts
        del of_families["qwen3_values"]
    ranks.run(functools.partial(frozen.families, of_families), layout, models)


def test_an_export_has_frozen_weights(models, tmp_path):
    frozen.check_resumed(models, "qwen2", ONE, precision="bfloat16")
    saved = models / "frozen-qwen2-one"
    policy = cases.policy(models / "qwen2", precision="bfloat16", tokenizer=TokenizerConfig(str(ROOT / "recipes/tiny")))
    export_checkpoint(saved, policy, tmp_path / "hf")
    found, files = load_file(tmp_path / "hf/model.safetensors"), load_file(models / "qwen2/model.safetensors")
    chosen = frozen.matched(frozen.FSDP["qwen2"], files)
    same = {name for name, tensor in files.items() if found[name].equal(tensor.to(found[name].dtype))}
    assert found.keys() == files.keys() and same == chosen
    names = [entry["name"] for entry in json.loads((saved / "train-rank00000.json").read_text())["tensors"].values()]
    kept = {name.split(".", 2)[2] for name in names if name.startswith("optimizer.")}
    assert kept == files.keys() - chosen


@pytest.mark.parametrize("other", [[], ["lm_head.*"]], ids=str)
def test_a_checkpoint_does_not_load_with_other_frozen_parameters(models, tmp_path, other):
    frozen.new(models, "qwen2", ONE, ["model.norm.*"]).shards().write(tmp_path, 0)
    with refused(("policy.freeze_parameters", "contradiction")):
        frozen.new(models, "qwen2", ONE, other).load(tmp_path)


@pytest.mark.parametrize(
    "family, pattern, code",
    [
        ("qwen2", "model.layers.2.*", "not-a-choice"),
        ("qwen2", "*", "contradiction"),
        ("qwen3_moe", "*.experts.1.*", "contradiction"),
        ("qwen3_moe", "*.experts.*.up_proj.*", "contradiction"),
        ("qwen3_tied", "lm_head.weight", "not-a-choice"),
    ],
)
def test_refused_at_load(models, family, pattern, code):
    with refused(("policy.freeze_parameters", code)):
        frozen.new(models, family, ONE, [pattern])

"""Compare adapters with peft's own model: on one rank, on several, in checkpoints and exports; check errors."""

import dataclasses
import functools
import json

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, JetMoeConfig

from pipeline.config import LoRAConfig, TokenizerConfig
from pipeline.train import lora
from pipeline.train.adapters.peft_files import export_adapters
from pipeline.train.hf_export import export_checkpoint
from pipeline.train.train_backend import ModelRole
from tests.end_to_end.runs import ROOT
from tests.problems import refused
from tests.train import adapters, attention_models, cases, ranks
from tests.train.ranks import Layout

pytestmark = pytest.mark.usefixtures("realm")
ONE = Layout(1, 1)
ALL = list(range(len(cases.LENGTHS)))
TOKENIZER = TokenizerConfig(str(ROOT / "recipes/tiny"))


def test_one_rank(models):
    adapters.all_adapters(ONE, models)


@pytest.mark.parametrize(
    "families",
    [("qwen2",), *(pytest.param(each, marks=pytest.mark.full) for each in (("qwen3_moe",), ("qwen3_tied", "qwen3")))],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, 2),
        pytest.param(Layout(2, 1), marks=pytest.mark.full),
        pytest.param(Layout(1, 2, sequence=True), marks=pytest.mark.full),
        pytest.param(Layout(1, 1, context=2), marks=pytest.mark.full),
        pytest.param(Layout(2, 1, replicas=2), marks=pytest.mark.full),
    ],
    ids=lambda layout: layout.name,
)
def test_two_ranks(models, layout, families):
    families = [family for family in families if family in ranks.families(layout)]
    ranks.run(functools.partial(adapters.some_adapters, families), layout, models)
    # What they saved goes on at one rank as it did at theirs.
    resumed = adapters.backend(models / "qwen3", ONE, scheduler=ranks.SCHEDULER)
    ranks.check_goes_on(resumed, ONE, models / ranks.saved_by(layout, "qwen3"))


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(1, 2, sequence=True)], ids=lambda layout: layout.name)
def test_joint_projections(layout, tmp_path):
    attention_models.write(tmp_path, adapters.JOINT)
    ranks.run(adapters.joint_projections, layout, tmp_path)


@pytest.fixture(scope="module")
def saved(models):
    ranks.run(adapters.save, Layout(2, 1), models)
    return models / "adapted" / "dp2"


@pytest.mark.parametrize("case", adapters.SAVED)
def test_a_checkpoint_is_exported_merged(models, saved, case, tmp_path):
    """Check a base from a checkpoint, a random one, and one with a value head."""
    family, head = (case if case in adapters.CASES else "qwen3"), ("values" if case == "values" else "logprobs")
    policy = cases.policy(models / family, tokenizer=TOKENIZER, random_init=case == "random")
    assert not any(
        name.startswith("model.model.") for name in json.loads((saved / case / "train-rank00000.json").read_text())["tensors"]
    )
    export_checkpoint(saved / case, policy, tmp_path / "hf", head)
    expected = load_file(saved / case / "weights.safetensors")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all((found[name] - tensor).abs().max() < 1e-7 for name, tensor in expected.items())
    # It is no longer the base.
    if case != "random":
        base = load_file(models / family / "model.safetensors")
        changed = {name for name in found.keys() & base.keys() if not torch.equal(found[name], base[name])}
        assert {name.split(".")[-2] for name in changed} == adapters.CASES[family][1]
    trained = adapters.backend(models / family, ONE, ModelRole(head), random_init=case == "random")
    trained.load(saved / case)
    exported = ranks.backend(cases.policy(tmp_path / "hf"), role=ModelRole(head, trained=False))
    ours, theirs = trained.forward([cases.pack(ALL)])[0], exported.forward([cases.pack(ALL)])[0]
    if head == "values":
        assert (ours.values - theirs.values).abs().max() < 1e-5
    else:
        assert (ours.logprobs - theirs.logprobs).abs().max() < 1e-5


@pytest.mark.parametrize("case", adapters.PEFT)
def test_peft_loads_an_exported_adapter(models, saved, case, tmp_path):
    """Check LoRA, rsLoRA, DoRA, and a value head."""
    family, head = adapters.PEFT[case], ("values" if case == "values" else "logprobs")
    trained = adapters.backend(models / family, ONE, ModelRole(head))
    trained.load(saved / case)
    export_adapters(saved / case, cases.policy(models / family), tmp_path / "adapter", head)
    auto = AutoModelForSequenceClassification if head == "values" else AutoModelForCausalLM
    options = {"experts_implementation": "eager"} | ({"num_labels": 1} if head == "values" else {})
    base = auto.from_pretrained(models / family, dtype=torch.float64, attn_implementation="eager", **options)
    peft = PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False).double()
    found = trained.forward([cases.pack(ALL)])[0]
    with torch.no_grad():
        if head == "values":
            bodies = [peft.base_model.model.model(tokens[None]).last_hidden_state[0] for tokens, _ in cases.sequences()]
            expected = torch.cat([peft.base_model.model.score(body)[:, 0] for body in bodies])
        else:
            expected = torch.cat(cases.logprobs_and_loss(peft)[0])
    assert (found.values if head == "values" else found.logprobs).sub(expected).abs().max() < 1e-5
    with refused(("adapter", "contradiction")):
        export_adapters(saved / "random", cases.policy(models / "qwen3", random_init=True), tmp_path / "none")


def test_an_adapter_of_another_model_is_not_exported(models, saved, tmp_path):
    with refused(("policy.model_name", "contradiction")):
        export_checkpoint(saved / "qwen3_moe", cases.policy(tiny(models, tmp_path)), tmp_path / "hf")
    with refused(("policy.model_name", "contradiction")):
        export_adapters(saved / "qwen2", cases.policy(tiny(models, tmp_path)), tmp_path / "adapter")


def tiny(models, folder):
    """Half as wide."""
    config = cases.configs()["qwen3"]
    config.hidden_size = 16
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "narrow")
    return folder / "narrow"


def test_other_adapters_do_not_resume(models, tmp_path):
    trained = adapters.backend(models / "qwen3", ONE)
    trained.shards().write(tmp_path, dist.get_rank())
    for change, message in [
        (LoRAConfig(True, dim=3, alpha=8), "policy.dtensor_cfg.lora_cfg: .*alpha 7 -> 8"),
        (LoRAConfig(True, dim=4, alpha=7), "dim 3 -> 4"),
        (LoRAConfig(), "dim 3 -> None"),
        (LoRAConfig(True, dim=3, alpha=7, exclude_modules=["q_proj"]), "of another model.*q_proj.lora_A"),
    ]:
        with pytest.raises(ValueError, match=message):
            ranks.backend(cases.policy(models / "qwen3"), lora_cfg=change).load(tmp_path)
    with pytest.raises(ValueError, match="dim None -> 3"):
        ranks.backend(cases.policy(models / "qwen3")).shards().write(tmp_path, dist.get_rank())
        trained.load(tmp_path)


@pytest.mark.parametrize(
    "init, spread", [("xavier", (2 / (3 + 32)) ** 0.5), ("gaussian", 1 / 3), ("kaiming", (1 / (3 * 32)) ** 0.5)]
)
def test_a_is_initialized_as_the_recipe_says(models, init, spread):
    config = LoRAConfig(True, dim=3, lora_A_init=init, match_all_linear=False, target_modules=["q_proj", "k_proj"])

    def drawn() -> torch.Tensor:
        trained = ranks.backend(cases.policy(models / "qwen3"), lora_cfg=config)
        return torch.stack([p.detach() for name, p in trained._model.hf.named_parameters() if ".lora_A." in name])

    first = drawn()
    assert first.shape == (4, 3, 32)
    assert abs(first.std() / spread - 1) < 0.15
    assert not torch.equal(first[0], first[1])
    assert torch.equal(drawn(), first)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_dropout_of_inputs_is_that_of_peft(models, family):
    """Check LoRA and DoRA: the same generator gives the same masks for one sequence."""
    dropped = dataclasses.replace(adapters.CASES[family][0], dropout=0.4, dropout_position="pre")
    trained = ranks.backend(cases.policy(models / family), lora_cfg=dropped)
    adapters.shake(trained)
    peft = adapters.peft_model(models / family, trained, lora_dropout=0.4).float().train()
    longest = cases.LENGTHS.index(max(cases.LENGTHS))
    tokens, weights = cases.sequences()[longest]
    torch.manual_seed(5)
    logits = peft(tokens[None]).logits[0, :-1] / cases.TEMPERATURE
    following = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    (-(following * weights[1:]).sum() / sum(cases.LENGTHS)).backward()
    expected = {adapters.ours(name): p.grad for name, p in peft.named_parameters() if p.requires_grad}
    before = trained.forward([cases.pack([longest])])[0].logprobs
    for recomputed in (False, True):
        if recomputed:
            trained = ranks.backend(cases.policy(models / family), lora_cfg=dropped, activation_checkpointing=True)
            adapters.shake(trained)
        torch.manual_seed(5)
        metrics = trained.step([cases.pack([longest])], cases.loss).metrics
        found = {name: p.grad for name, p in trained._model.hf.named_parameters() if p.requires_grad}
        ranks.assert_near(found, expected, 1e-5)
        assert abs(metrics["logprob"] - following.sum().item() / sum(cases.LENGTHS)) < 1e-5
        assert abs(metrics["logprob"] - before.sum().item() / sum(cases.LENGTHS)) > 1e-3  # log-probs are without dropout


def test_dropout_of_outputs(models):
    """Check that training passes drop entries of B A x and scale the rest, and that a step draws new ones."""
    dropped = dataclasses.replace(adapters.CASES["qwen3"][0], dropout=0.5)
    trained = ranks.backend(cases.policy(models / "qwen3"), lora_cfg=dropped)
    adapters.shake(trained)
    layer = trained._model.adapters.items[0].layer
    hidden = torch.randn(400, 32)
    without = layer(hidden) - layer.base_layer(hidden)
    with trained._model.adapters.switch.training():
        first, second = (layer(hidden) - layer.base_layer(hidden) for _ in range(2))
    kept = first.abs() > 1e-4
    assert abs(kept.float().mean() - 0.5) < 0.02
    assert (first[kept] - 2 * without[kept]).abs().max() < 1e-5
    assert not torch.equal(first, second)
    assert torch.equal(layer(hidden) - layer.base_layer(hidden), without)


# ---- refusals -----------------------------------------------------------------------------------------------------------

REFUSED = {
    "typo": ("qwen3", {"match_all_linear": False, "target_modules": ["q_proj", "qproj"]}, "target_modules", "not-a-choice"),
    "no layer": ("qwen3", {"match_all_linear": False, "target_modules": ["self_attn"]}, "target_modules", "not-a-choice"),
    "embedding": ("qwen3", {"match_all_linear": False, "target_modules": ["embed_tokens"]}, "target_modules", "not-a-choice"),
    "head": ("qwen3", {"match_all_linear": False, "target_modules": ["lm_head"]}, "target_modules", "not-a-choice"),
    "excluded typo": ("qwen3", {"exclude_modules": ["down"]}, "exclude_modules", "not-a-choice"),
    "both": ("qwen3", {"target_modules": ["q_proj"]}, "target_modules", "contradiction"),
    "neither": ("qwen3", {"match_all_linear": False}, "target_modules", "contradiction"),
    "nothing left": (
        "qwen3",
        {"match_all_linear": False, "target_modules": ["q_proj"], "exclude_modules": ["q_proj"]},
        "exclude_modules",
        "contradiction",
    ),
    "module of experts": (
        "qwen3_moe",
        {"match_all_linear": False, "target_modules": ["experts"]},
        "target_modules",
        "not-a-choice",
    ),
    "part of a parameter of experts": (
        "qwen3_moe",
        {"match_all_linear": False, "target_modules": ["experts.gate_proj"]},
        "target_modules",
        "not-a-choice",
    ),
    "rank": ("qwen3", {"dim": 0}, "dim", "too-small"),
    "init": ("qwen3", {"lora_A_init": "zeros"}, "lora_A_init", "not-a-choice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(models, case):
    family, changes, key, code = REFUSED[case]
    with refused((f"policy.dtensor_cfg.lora_cfg.{key}", code)):
        ranks.backend(cases.policy(models / family), lora_cfg=dataclasses.replace(LoRAConfig(True), **changes))


def test_experts_that_transformers_does_not_dispatch_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(JetMoeConfig(hidden_size=32, num_hidden_layers=1, vocab_size=61))
    with refused(("policy.dtensor_cfg.lora_cfg.match_all_linear", "unsupported")):
        lora.inject(model, LoRAConfig(True), {})

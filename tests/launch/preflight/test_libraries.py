"""Recipe sections passed to a library: their keys are compared with the library's source, without importing it."""

import ast
import dataclasses
import importlib.util
import inspect
import json
import subprocess
import sys

import pytest

from launch.executors.executor import ROOT
from launch.preflight import installed, libraries, signatures
from pipeline import config
from pipeline.algorithms.evaluate import EvaluateConfig, LmEvalConfig, TaskConfig
from pipeline.config import Problem, Recipe
from pipeline.train.megatron import cpu  # noqa: F401 before Megatron-Core is imported
from tests.launch.model import write_recipe
from tests.problems import named


@pytest.fixture
def problems(tmp_path):
    path = str(write_recipe(tmp_path))

    def of(*overrides: str) -> list[Problem]:
        return list(libraries.problems(config.load(path, overrides)))

    return of


def check_fields(cls: type, path: str) -> None:
    assert set(signatures.signature(path).parameters) == {field.name for field in dataclasses.fields(cls) if field.init}


@pytest.mark.long  # vLLM's import takes a minute
def test_vllms_parsed_signature_equals_the_class():
    from vllm import EngineArgs

    check_fields(EngineArgs, "vllm.engine.arg_utils.EngineArgs")


def test_parsed_signatures_equal_the_classes():
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    for cls in (TransformerConfig, MLATransformerConfig):
        check_fields(cls, f"{cls.__module__}.{cls.__name__}")
    for path in ("torch.optim.AdamW", "torch.optim.SGD", "torch.optim.Muon", *SCHEDULES):
        module, _, name = path.rpartition(".")
        cls = getattr(torch.optim if module == "torch.optim" else torch.optim.lr_scheduler, name)
        real, read = inspect.signature(cls).parameters, signatures.signature(path).parameters
        assert [(p.name, p.kind, p.default is p.empty) for p in read.values()] == [
            (p.name, p.kind, p.default is p.empty) for p in real.values()
        ]


SCHEDULES = [f"torch.optim.lr_scheduler.{name}" for name in ("LinearLR", "ConstantLR", "CosineAnnealingLR", "LambdaLR")]


def test_positional_arguments_are_no_option(problems, tmp_path, monkeypatch):
    (tmp_path / "a_library.py").write_text(
        "class Adam:\n    def __init__(self, params, *rest, lr=1.0, weight_decay=0.0): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    optimizer = ["policy.optimizer.name=a_library.Adam"]
    assert problems(*optimizer) == []
    assert named(problems(*optimizer, "policy.optimizer.kwargs.rest=1")) == {("policy.optimizer.kwargs.rest", "unknown-key")}


def test_problems_have_the_order_of_the_recipe(problems):
    names = ("max_num_partial_prefills", "block_size", "seed_offset", "enable_lora", "swap_space", "disable_log_stats")
    found = problems(*(f"policy.generation.vllm_kwargs.{name}=[odd]" for name in names))
    wrong = [problem.key.rpartition(".")[2] for problem in found if problem.code == "wrong-type"]
    assert len(wrong) > 2 and wrong == [name for name in names if name in wrong]


def test_a_missing_class_and_a_missing_library():
    with pytest.raises(signatures.NoSuchClass):
        signatures.signature("torch.optim.AdamX")
    assert signatures.signature("a_library_that_is_not_installed.Adam") is None
    assert signatures.signature("Adam") is None


NOT_GIVEN = {
    *("model_type", "transformers_version", "_name_or_path", "output_attentions"),
    *("head_dim", "qk_head_dim"),  # of deepseek_v3: derived from others
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "nemotron_h", "gpt_oss"])
def test_config_overrides_are_those_that_transformers_takes(tmp_path, family):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "rope_theta": 1000.0}))
    loaded = AutoConfig.from_pretrained(tmp_path)
    names = [*loaded.to_dict(), "rope_scaling", "rope_theta", "hidden_sizes", "sliding_window", "text_config", "num_experts"]
    assert len(names) > 20
    for name in dict.fromkeys(names):
        if name in NOT_GIVEN:
            continue
        policy = config.PolicyConfig(model_name="x", hf_config_overrides={name: None})
        refused = list(libraries.unknown_overrides("policy", policy, tmp_path))
        held = hasattr(loaded, name) or (name == "rope_theta" and hasattr(loaded, "rope_parameters"))  # which hold it
        assert bool(refused) == (not held), (name, refused)


MEGATRON = "policy.megatron_cfg.enabled=true"
VLLM = "policy.generation.vllm_kwargs"
SCHEDULE = "policy.scheduler={name: torch.optim.lr_scheduler."
MUON = "policy.optimizer={name: torch.optim.Muon"


@pytest.mark.parametrize(
    ("overrides", "key", "code"),
    [
        ([f"{VLLM}={{kv_cache_memory_bytes: 1, moe_backend: triton, enable_chunked_prefill: null}}"], None, None),
        ([f"{VLLM}={{kv_cache_memory_bytes: many}}"], f"{VLLM}.kv_cache_memory_bytes", "wrong-type"),
        ([f"{VLLM}={{max_num_batched_tokens: 1.5}}"], f"{VLLM}.max_num_batched_tokens", "wrong-type"),
        ([f"{VLLM}={{trust_remote_code: 1}}"], f"{VLLM}.trust_remote_code", "wrong-type"),
        ([f"{VLLM}={{seed: 1}}"], f"{VLLM}.seed", "contradiction"),
        ([f"{VLLM}={{dtype: half}}"], f"{VLLM}.dtype", "contradiction"),
        (["policy.generation.backend=transformers", f"{VLLM}={{anything: 1}}"], None, None),
        (["policy.optimizer.kwargs={lr: 1, betas: [0.9, 0.95], fused: true}"], None, None),
        (["policy.optimizer.kwargs={lr: -1}"], "policy.optimizer.kwargs.lr", "wrong-type"),
        (["policy.optimizer.name=AdamW"], "policy.optimizer.name", "bad-format"),
        (["policy.optimizer.name=torch.optim.AdamX"], "policy.optimizer.name", "not-a-choice"),
        (["policy.optimizer.name=torch.optim.Muon"], None, None),
        ([f"{MUON}, kwargs: {{lr: 0.1, adamw: {{lr: 0.1, betas: [0.9, 0.95]}}}}}}"], None, None),
        ([f"{MUON}, kwargs: {{lr: 0.1, adamw: {{lr: -1}}}}}}"], "policy.optimizer.kwargs.adamw.lr", "wrong-type"),
        ([f"{MUON}, kwargs: {{lr: 0.1, adamw: {{momentum: 0.9}}}}}}"], "policy.optimizer.kwargs.adamw.momentum", "unknown-key"),
        ([f"{MUON}, kwargs: {{lr: 0.1, adamw: 0.1}}}}"], "policy.optimizer.kwargs.adamw", "wrong-type"),
        ([f"{MUON}, kwargs: {{lr: 0.1, betas: [0.9, 0.95]}}}}"], "policy.optimizer.kwargs.betas", "unknown-key"),
        ([MEGATRON, "policy.optimizer.name=torch.optim.Muon"], "policy.optimizer.name", "unsupported"),
        (["policy.optimizer.kwargs.betas=0.9"], "policy.optimizer.kwargs.betas", "wrong-type"),
        (["policy.optimizer.kwargs.amsgrad=0.9"], "policy.optimizer.kwargs.amsgrad", "wrong-type"),
        (["policy.optimizer.kwargs.fused=true"], None, None),
        (["policy.optimizer.name=torch.optim.lbfgs.LBFGS"], "policy.optimizer.name", "unsupported"),
        (
            ["policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 1, fused: true}}"],
            "policy.optimizer.kwargs.fused",
            "unsupported",
        ),
        ([f"{SCHEDULE}StepLR, kwargs: {{}}}}"], "policy.scheduler.kwargs.step_size", "missing-value"),
        ([f"{SCHEDULE}LambdaLR}}"], "policy.scheduler.name", "unsupported"),
        (
            ["policy.optimizer.name=torch.optim.SGD", "policy.optimizer.kwargs.momentu=1"],
            "policy.optimizer.kwargs.momentu",
            "unknown-key",
        ),
        ([MEGATRON, "policy.optimizer.kwargs.amsgrad=true"], "policy.optimizer.kwargs.amsgrad", "unknown-key"),
        ([MEGATRON, "policy.optimizer.name=torch.optim.SGD"], "policy.optimizer.name", "unsupported"),
        ([MEGATRON, "policy.megatron_cfg.optimizer.lr=1e-6", "policy.optimizer.name=SGD"], None, None),
        ([f"{SCHEDULE}LinearLR, kwargs: {{start: 1}}}}"], "policy.scheduler.kwargs.start", "unknown-key"),
        ([f"{SCHEDULE}LinearLR, kwarg: {{}}}}"], "policy.scheduler", "bad-format"),
        ([f"{SCHEDULE}LinearLR, kwargs: 3}}"], "policy.scheduler.kwargs", "wrong-type"),
        ([f"{SCHEDULE}ReduceLROnPlateau}}"], "policy.scheduler.name", "unsupported"),
        (["policy.scheduler=[]"], "policy.scheduler", "bad-format"),
        (["policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR}, {milestones: [3]}]"], "policy.scheduler", "bad-format"),
        (["policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR}, {milestones: []}]"], None, None),
        (["policy.scheduler=7"], "policy.scheduler", "bad-format"),
        ([MEGATRON, "policy.megatron_cfg.model_overrides={masked_softmax_fusion: true}"], None, None),
        (
            [MEGATRON, "policy.megatron_cfg.model_overrides={bf16: true}"],
            "policy.megatron_cfg.model_overrides.bf16",
            "contradiction",
        ),
        (
            [MEGATRON, "policy.megatron_cfg.model_overrides={moe_z_loss_coeff: 1e-3}"],
            "policy.megatron_cfg.model_overrides.moe_z_loss_coeff",
            "contradiction",
        ),
        (["policy.megatron_cfg.model_overrides={anything: true}", "policy.dtensor_cfg.enabled=true"], None, None),
    ],
)
def test_options_of_a_library(problems, overrides, key, code):
    assert named(problems(*overrides)) == ({(key, code)} if key else set())


def test_an_unknown_option_suggests_the_nearest(problems):
    (problem,) = problems("policy.optimizer.name=torch.optim.SGD", "policy.optimizer.kwargs.momentu=1")
    assert "Did you mean 'momentum'?" in problem.message
    (problem,) = problems("policy.optimizer.kwargs.learning_rate=1")
    assert "Did you mean 'lr'?" in problem.message


def test_the_package_that_encrypts_must_be_installed_if_ranks_use_this_python(problems, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "cryptography" else find(name))
    given = ("checkpointing.encryption.key_file=key", "checkpointing.encryption.enabled=true")
    assert named(problems(*given)) == {("checkpointing.encryption.enabled", "not-installed")}
    assert problems(given[0]) == [] and problems(*given, "cluster.train.python=/another/python") == []


GPU = ("cluster.train.gpus_per_node=1", "policy.dtensor_cfg.enabled=true")


@pytest.mark.parametrize(
    ("asked", "package", "component"),
    [
        (("policy.dtensor_cfg.use_liger_kernel=true", *GPU), "liger_kernel", "train"),
        (("policy.dtensor_cfg.flash_attention=3", *GPU), "flash_attn_interface", "train"),
        (("env.it={kind: ifeval}",), "langdetect", "generate"),
        (("policy.model_name=Qwen/Qwen3.5-9B", "policy.generation.backend=vllm"), "torchvision", "generate"),
        (("env.it={kind: verifiers, kwargs: {taskset: x}}", "data.apply_chat_template=true"), "verifiers", "generate"),
    ],
)
def test_optional_packages_must_be_installed_if_ranks_use_this_python(problems, monkeypatch, asked, package, component):
    found, installed = importlib.util.find_spec, []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or (name != package and found(name)) or None)
    (problem,) = problems(*asked)
    assert problem.code == "not-installed" and package in problem.message
    assert problems(*asked, f"cluster.{component}.container_image=image") == []
    assert problems(*asked, f"cluster.{component}.python=/another/python") == []
    installed.append(package)
    assert problems(*asked) == []


def test_options_of_a_missing_library_are_noted_as_unchecked(tmp_path, monkeypatch):
    recipe = config.load(str(write_recipe(tmp_path)), ["policy.generation.vllm_kwargs={swap_space: 1}"])
    assert list(libraries.notes(recipe)) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    torch, vllm = libraries.notes(recipe)
    assert "policy.optimizer and policy.scheduler, as torch" in torch and "vllm_kwargs, as vllm" in vllm


def test_the_check_refuses_the_engines_own_arguments():
    """Each argument that pipeline/generate/vllm.py sets is refused in vllm_kwargs, except those that a recipe may change."""
    tree = ast.parse((ROOT / "pipeline/generate/vllm.py").read_text())
    (function,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_arguments"]
    given = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name):
            given |= {key.value for key in node.value.keys}
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            given.add(node.slice.value)
    memory = {"kv_cache_memory_bytes", "enable_chunked_prefill", "max_num_batched_tokens"}
    may_be_changed = memory | {"attention_backend", "speculative_config", "language_model_only"}
    assert given - may_be_changed <= {*libraries.SET_BY_KEYS, *libraries.FIXED}
    assert may_be_changed <= given


def test_the_check_does_not_import_the_libraries():
    code = (
        "import sys; from launch.preflight import signatures, libraries as p\n"
        "assert signatures.signature('vllm.engine.arg_utils.EngineArgs') and signatures.signature('torch.optim.AdamW')\n"
        "assert p._configuration('llama')\n"
        "assert not {'torch', 'vllm', 'transformers', 'megatron.core'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_lm_evaluation_harness_must_be_installed_in_its_version(monkeypatch):
    versions = {"lm_eval": "0.4.9"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: versions[name])
    named, suite = EvaluateConfig(lm_eval=LmEvalConfig(["mmlu"])), EvaluateConfig({"it": TaskConfig(kind="lm_eval")})
    for section, key in ((named, "evaluate.lm_eval.tasks"), (suite, "evaluate.tasks.it.kind")):
        recipe = Recipe(algorithm="evaluate", evaluate=section)
        versions["lm_eval"] = "0.4.9"
        (problem,) = installed._harness(recipe)
        assert (problem.key, problem.code) == (key, "not-installed") and "0.4.9" in problem.message
        versions["lm_eval"] = "0.4.13"
        assert list(installed._harness(recipe)) == []
    assert list(installed._harness(Recipe(algorithm="evaluate", evaluate=EvaluateConfig({"it": TaskConfig()})))) == []

"""Requests cannot set what belongs to the service, import code, or read its environment."""

import pytest
from fastapi.testclient import TestClient

from launch.serving import governed
from launch.serving.app import application
from launch.serving.refusals import RefusalLog
from pipeline.config import RECIPES
from tests.launch.serving.team import bearer, settings
from tests.launch.serving.test_refusals import lines
from tests.problems import refused

ENGINE = "policy.generation.vllm_kwargs"
ALLOWED = [
    {},
    {"sft.max_num_steps": 3, "policy": {"train_global_batch_size": 8, "scheduler": None}},
    {"cluster": {"executor": "local", "train.ranks_per_node": 1, "train": {"nodes": 2, "partition": "gpu"}}},
    {"policy.model_name": str(RECIPES / "tiny")},
    {"policy.model_name": "Qwen/Qwen3-8B", "data.train.dataset_name": "openai/gsm8k"},
    {"needs": []},
    {"needs": ["tiny_sft"]},
    {"policy.tokenizer.chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"},
    {"policy.generation.vllm_kwargs.enforce_eager": True, "logger.wandb.project": "a/b"},
    {"policy.generation.vllm_kwargs": {"kv_cache_dtype": "fp8", "speculative_config": {"model": "Qwen/Qwen2.5-0.5B"}}},
    {"policy.optimizer.name": "torch.optim.AdamW", "policy.scheduler": {"name": "torch.optim.lr_scheduler.LinearLR"}},
]
REFUSED = [
    ({"cluster.audit": "none"}, "cluster.audit"),
    ({"cluster": {"audit": "/tmp"}}, "cluster.audit"),
    ({"cluster": {"_override_": True, "executor": "local"}}, "cluster"),
    ({"cluster.train": {}}, "cluster.train"),
    ({"cluster.train.python": "/bin/sh"}, "cluster.train.python"),
    ({"cluster.generate.container_mounts": ["/:/host"]}, "cluster.generate.container_mounts"),
    ({"cluster.train.env_vars.LD_PRELOAD": "x"}, "cluster.train.env_vars.LD_PRELOAD"),
    ({"checkpointing.encryption": {"enabled": False}}, "checkpointing.encryption.enabled"),
    ({"checkpointing.encryption.key_command": "touch x"}, "checkpointing.encryption.key_command"),
    ({"checkpointing": None}, "checkpointing"),
    ({"module_folders": ["."]}, "module_folders"),
    ({"run_dir": "/tmp/x"}, "run_dir"),
    ({"needs": ["/tmp/x.yaml"]}, "needs"),
    ({"needs": ["../x"]}, "needs"),
    ({"needs": ["no_such_recipe"]}, "needs"),
    ({"needs": "tiny_sft"}, "needs"),
    ({"env.math.kind": "evilmod.Env"}, "env.math.kind"),
    ({"env.math.rewards": [{"fn": "evilmod.right"}]}, "env.math.rewards"),
    ({"env.math.kwargs.tools": ["a.B"]}, "env.math.kwargs.tools"),
    ({"env.math.kwargs.tools.x.kind": "a.B"}, "env.math.kwargs.tools.x.kind"),
    ({"env.math.kwargs.sandbox": "none"}, "env.math.kwargs.sandbox"),
    ({"env.judge": {"_override_": True, "kind": "llm_judge"}}, "env.judge"),
    ({"data.train.dataset_name": "pkg.rows"}, "data.train.dataset_name"),
    ({"evaluate.tasks.x.format": "pkg.Format"}, "evaluate.tasks.x.format"),
    ({"policy.model_name": "${oc.env:HOME}"}, "policy.model_name"),
    ({"name": "${run_dir}"}, "name"),
    ({"data.train.kwargs": {"data_files": ["${oc.decode:x}"]}}, "data.train.kwargs.data_files"),
    ({"data.train.data_path": "/etc/passwd"}, "data.train.data_path"),
    ({"data.train.data_path": "pyproject.toml"}, "data.train.data_path"),
    ({"data.train.kwargs.data_files": ["/etc/passwd"]}, "data.train.kwargs.data_files"),
    ({"data.train.kwargs.data_files": "file:///etc/passwd"}, "data.train.kwargs.data_files"),
    ({"data.train.kwargs.data_files": "simplecache::/etc/passwd"}, "data.train.kwargs.data_files"),
    ({"data.train.kwargs.data_files": "recipes/../../../../../etc/pass*"}, "data.train.kwargs.data_files"),
    ({"data.train.data_path": "not_there/../../../../../etc/passwd"}, "data.train.data_path"),
    ({"data.train.kwargs.cache_dir": "x/y"}, "data.train.kwargs.cache_dir"),
    ({"policy.optimizer.name": "antigravity.Adam"}, "policy.optimizer.name"),
    ({"policy.scheduler": [{"name": "antigravity.Linear"}]}, "policy.scheduler"),
    ({f"{ENGINE}.distributed_executor_backend": "a.B"}, f"{ENGINE}.distributed_executor_backend"),
    ({f"{ENGINE}.compilation_config.inductor_passes": {"x": "os.system"}}, f"{ENGINE}.compilation_config.inductor_passes.x"),
    ({f"{ENGINE}.kv_transfer_config.kv_connector_module_path": "a"}, f"{ENGINE}.kv_transfer_config.kv_connector_module_path"),
    ({"policy.model_name": "~/models"}, "policy.model_name"),
    ({"policy.model_name": f"{RECIPES}/../launch"}, "policy.model_name"),
    ({"policy.model_name": "{root}/link"}, "policy.model_name"),
    ({"logger.mlflow.tracking_uri": "http://elsewhere"}, "logger.mlflow.tracking_uri"),
    ({"policy.generation.vllm_kwargs.worker_extension_cls": "a.B"}, "policy.generation.vllm_kwargs.worker_extension_cls"),
    ({"evaluate.lm_eval.include_path": "x"}, "evaluate.lm_eval.include_path"),
]


@pytest.mark.parametrize("overrides", ALLOWED, ids=str)
def test_allowed(tmp_path, overrides):
    governed.check(overrides, [tmp_path])


@pytest.mark.parametrize(("overrides", "key"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(tmp_path, overrides, key):
    (tmp_path / "link").symlink_to("/etc")
    given = {
        name: value.replace("{root}", str(tmp_path)) if isinstance(value, str) else value for name, value in overrides.items()
    }
    with refused((key, "no-access")):
        governed.check(given, [tmp_path])


@pytest.mark.parametrize(
    "key",
    [
        "overrides.cluster.audit",
        "runs.tiny_sft.overrides.cluster.audit",
        "search.parameters.cluster.audit",
        "baseline",
        "folder",
    ],
)
def test_refused_in_a_sweep(tmp_path, key):
    with refused((key, "no-access")):
        governed.check({key: "x"}, [tmp_path], of_suite=True)


def test_a_governed_key_exists_in_the_schema():
    """A key that is renamed must not fall out of the table unseen."""
    known = (RECIPES / "KEYS.md").read_text()
    for key in governed.GOVERNED:
        last = key.rpartition(".")[2]
        of_library = "vllm_kwargs" in key or last == "cache_dir"  # of `datasets`
        assert "*" in last or f"`{last}`" in known or of_library, key


@pytest.mark.parametrize("writable", [True, False])
def test_a_request_neither_imports_nor_resolves(tmp_path, writable, monkeypatch):
    monkeypatch.setenv("HETSTEP_TEST_PRIVATE", "value-of-the-service")
    log = RefusalLog(tmp_path)
    with TestClient(application(settings(tmp_path, writable=writable), log.record)) as client:
        plans = f"{client.base_url}/api/v1/plans"
        code = {"recipe": "tiny_grpo", "overrides": {"env.x.kind": "antigravity.Env"}}
        variable = {"recipe": "tiny_sft", "overrides": {"policy.model_name": "${oc.env:HETSTEP_TEST_PRIVATE}"}}
        for body in (code, variable):
            answer = client.post(plans, headers=bearer("sam"), json=body)
            assert answer.status_code == 403 and "value-of-the-service" not in answer.text, answer.text
        unrecorded = {"recipe": "tiny_sft", "name": "a", "overrides": {"cluster.audit": "none"}}
        answer = client.post(f"{client.base_url}/api/v1/runs", headers=bearer("sam"), json=unrecorded)
        assert answer.status_code == 403 and not (tmp_path / "sam/a").exists()
    log.wait(60)
    assert [line["details"]["requested_by"] for line in lines(tmp_path)] == ["sam"] * 3

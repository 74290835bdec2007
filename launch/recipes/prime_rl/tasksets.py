"""Translate sources of tasks, tasksets of the package `verifiers`, and sampling."""

from __future__ import annotations

import difflib
import re
from typing import Any

from launch.recipes.prime_rl.prime_rl_defaults import EVAL
from launch.recipes.prime_rl.prime_rl_loss import group_size
from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply
from launch.recipes.translation.translator import Translator

TASKS = "pipeline.environments.verifiers.tasks"
ALL = 1_000_000
"""A number of tasks that is no limit."""
TURNS = 32
TRAIN, EVALUATION = "orchestrator.train", "orchestrator.eval"
SAMPLING = f"{TRAIN}.sampling"
GENERATION = "policy.generation"
OF_ENV = ("taskset", "id")
SOURCE = {"name", "ratio", "env", "serve", "sampling", "group_size", "algo", "curriculum", "num_examples", "interval"}
"""Keys of a source."""
RULES = (
    Done(f"{SAMPLING}.temperature {SAMPLING}.max_completion_tokens orchestrator.seq_len"),
    Only(f"{SAMPLING}.extra_body", (None,), "arguments of requests to the engine", "policy.generation of Hetstep"),
    Only(f"{SAMPLING}.extra_body.*", (), "arguments of requests to the engine", "policy.generation of Hetstep"),
    Only("orchestrator.model.vlm trainer.model.vlm model.vlm", (None,), "images", "null"),
    Only("orchestrator.model.vlm.* trainer.model.vlm.* model.vlm.*", (), "images", "null"),
    Changed("orchestrator.tasks_per_minute", (None,), "episodes start as fast as the engines sample"),
    Ignored("orchestrator.renderer.* orchestrator.tokenizer.*", "the tokenizer's chat template renders messages"),
    Ignored("orchestrator.concurrency.* orchestrator.env_server_base_port orchestrator.num_train_workers"),
    Ignored("orchestrator.pad_to_multiple_of orchestrator.collect_inference_metrics orchestrator.inference_metrics_roles"),
    Ignored("orchestrator.log.* orchestrator.monitors.* orchestrator.ckpt.* orchestrator.resume.* orchestrator.heartbeat*"),
    Ignored("orchestrator.weight_broadcast.* orchestrator.rollout_transport.* orchestrator.output_dir orchestrator.max_steps"),
    Ignored(
        "orchestrator.model.name orchestrator.model.client.* orchestrator.model.trust_remote_code orchestrator.model.lora.*"
    ),
    Ignored("orchestrator.env_vars.*", "cluster.generate.env_vars sets variables of the ranks that play episodes"),
)


def translate(t: Translator) -> None:
    """Translate training and evaluation tasks, and sampling."""
    sources: Any = t.get(f"{TRAIN}.source") or []
    if not sources:
        text = "got no source of tasks; expected a table [[orchestrator.train.source]] with env.taskset.id"
        t.problem(f"{TRAIN}.source", "missing-value", text)
    names: dict[str, Any] = {}
    several = len(sources) > 1
    if several:
        t.put("data.train", None, f"{TRAIN}.source")
    for number, source in enumerate(sources):
        key = f"{TRAIN}.source[{number}]"
        if (env := _taskset(t, key, source)) is None:
            continue
        name, taskset, config = env
        ours = f"data.datasets.{name}" if several else "data.train"
        _tasks(t, ours, f"{TRAIN}.source", name, taskset, config, ALL)
        if several:
            t.put(f"{ours}.weight", float(source.get("ratio", 1.0)), f"{TRAIN}.source")
        _environment(t, names, f"{TRAIN}.source", name, taskset, config)
        _overrides(t, key, source)
    t.consume(f"{TRAIN}.source")
    t.put("grpo.max_rollout_turns", TURNS, f"{TRAIN}.source")
    t.put("data.apply_chat_template", True, f"{TRAIN}.source")
    _sampling(t)
    _evaluation(t, names)
    apply(t, RULES)


def _taskset(t: Translator, key: str, source: dict[str, Any]) -> tuple[str, str, dict[str, Any]] | None:
    """Return (name, taskset, its configuration) of a source; None, with a problem, for one that is not supported."""
    env = source.get("env", {})
    config = dict(env.get("taskset", {}))
    taskset = config.pop("id", None)
    agents = {name: value for name, value in env.items() if isinstance(value, dict) and name not in OF_ENV}
    if taskset is None:
        feature = "an environment of prime-rl other than a taskset" if env else "a source without a taskset"
        t.lacks(key, env.get("id"), feature, "env.taskset.id")
        return None
    if len(agents) > 1 or env.get("id") not in (None, "single-agent", "single_agent"):
        t.lacks(f"{key}.env", ", ".join(agents) or env.get("id"), "environments of several agents", "one agent")
        return None
    agent = next(iter(agents.values()), {})
    harness = agent.get("harness", {}).get("id")
    if harness not in (None, "null"):
        t.lacks(f"{key}.env.agent.harness.id", harness, f"the harness {harness}", "null, a chat with the task's tools")
    runtime = agent.get("runtime", {}).get("type", "subprocess" if not agent.get("runtime") else None)
    if runtime not in ("subprocess", None):
        t.lacks(f"{key}.env.agent.runtime.type", runtime, "tasks in containers or sandboxes", "subprocess")
    _refuse_curriculum(t, key, source.get("curriculum"))
    for unknown in source.keys() - SOURCE:
        near = difflib.get_close_matches(unknown, SOURCE, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ". Try without it"
        t.problem(f"{key}.{unknown}", "unknown-key", f"is not a key of prime-rl's sources{hint}")
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", str(source.get("name") or taskset)).lstrip("_-") or "tasks"
    return name, str(taskset), config


def _refuse_curriculum(t: Translator, key: str, curriculum: dict[str, Any] | None) -> None:
    """Translate the gate on groups without an advantage, and report difficulty pools and other gates."""
    if not curriculum:
        return
    sampler = (curriculum.get("sampler") or {}).get("type", "standard")
    if sampler != "standard":
        t.lacks(f"{key}.curriculum.sampler.type", sampler, "a curriculum: pools of tasks by their difficulty", "standard")
    for name, gate in (curriculum.get("gates") or {}).items():
        if gate.get("reject_min", 0.0) == gate.get("reject_max", 0.0) == 0.0:
            t.put("grpo.use_dynamic_sampling", True, f"{TRAIN}.source")
        else:
            t.lacks(f"{key}.curriculum.gates.{name}", gate, "a curriculum: gates on the range of advantages", "0.0 to 0.0")


def _overrides(t: Translator, key: str, source: dict[str, Any]) -> None:
    """Report settings of a source that differ from those of all sources."""
    size, _ = group_size(t)
    if (given := source.get("group_size", t.get("orchestrator.group_size"))) != size:
        t.lacks(f"{key}.group_size", given, "another group_size for a source", "orchestrator.group_size")
    if (algorithm := source.get("algo")) not in (None, {"type": t.get("orchestrator.algo.type")}):
        t.lacks(f"{key}.algo", algorithm, "another algorithm for a source", "orchestrator.algo")
    for name, given in source.get("sampling", {}).items():
        if given != t.get(f"{SAMPLING}.{name}"):
            t.lacks(f"{key}.sampling.{name}", given, "another sampling for a source", f"{SAMPLING}.{name}")


def _tasks(t: Translator, ours: str, theirs: str, name: str, taskset: str, config: dict[str, Any], size: int) -> None:
    t.put(f"{ours}.dataset_name", TASKS, theirs)
    t.put(f"{ours}.messages_key", "messages", theirs)
    t.put(f"{ours}.output_key", "answer", theirs)
    t.put(f"{ours}.env_name", name, theirs)
    kwargs: dict[str, Any] = {"taskset": taskset, "size": size}
    t.put(f"{ours}.kwargs", kwargs | ({"config": config} if config else {}), theirs)


def _environment(t: Translator, names: dict[str, Any], theirs: str, name: str, taskset: str, config: dict[str, Any]) -> None:
    kwargs: dict[str, Any] = {"taskset": taskset} | ({"config": config} if config else {})
    if names.setdefault(name, kwargs) != kwargs:
        t.problem(theirs, "ambiguous", f"got two tasksets named {name}; expected names that differ")
    t.put(f"env.{name}.kind", "verifiers", theirs)
    t.put(f"env.{name}.kwargs", kwargs, theirs)


def _sampling(t: Translator) -> None:
    longest, answer = t.get("orchestrator.seq_len"), t.get(f"{SAMPLING}.max_completion_tokens")
    t.put("policy.max_total_sequence_length", longest, "orchestrator.seq_len")
    t.put(f"{GENERATION}.max_new_tokens", answer or longest, f"{SAMPLING}.max_completion_tokens")
    temperature = t.get(f"{SAMPLING}.temperature")
    t.put(f"{GENERATION}.temperature", temperature, f"{SAMPLING}.temperature")
    t.put(f"{GENERATION}.top_p", 1.0, f"{SAMPLING}.temperature")
    if not temperature:
        t.lacks(f"{SAMPLING}.temperature", temperature, "training on greedy answers", "1.0")


def _evaluation(t: Translator, names: dict[str, Any]) -> None:
    given = t.get(EVALUATION)
    for name in (*EVAL, "source", "sampling", "retrigger_on_resume"):
        t.consume(f"{EVALUATION}.{name}")
    if not isinstance(given, dict) or not given.get("source"):
        if isinstance(given, dict):
            text = "got no source of tasks; expected a table [[orchestrator.eval.source]] with env.taskset.id"
            t.problem(f"{EVALUATION}.source", "missing-value", text)
        t.put("grpo.val_period", 0, EVALUATION)
        return
    shared = {**EVAL, **given}
    sampling = given.get("sampling", {})
    for number, source in enumerate(given["source"]):
        key = f"{EVALUATION}.source[{number}]"
        if (env := _taskset(t, key, source)) is None:
            continue
        name, taskset, config = env
        if name in names and names[name] != {"taskset": taskset} | ({"config": config} if config else {}):
            name = f"{name}_eval"
        size = source.get("num_examples", shared["num_examples"])
        _tasks(t, f"data.validations.{name}", EVALUATION, name, taskset, config, ALL if size < 0 else size)
        _environment(t, names, EVALUATION, name, taskset, config)
        for setting in ("interval", "group_size"):
            if source.get(setting, shared[setting]) != shared[setting]:
                t.change(f"{key}.{setting}", f"all sources are evaluated with {setting}={shared[setting]}")
    t.put("grpo.val_period", shared["interval"], f"{EVALUATION}.interval")
    t.put("grpo.val_at_start", not shared["skip_first_step"], f"{EVALUATION}.skip_first_step")
    t.put("grpo.val_num_generations_per_prompt", shared["group_size"], f"{EVALUATION}.group_size")
    t.put("grpo.max_val_samples", ALL, f"{EVALUATION}.num_examples")
    for theirs, ours in (("temperature", "val_temperature"), ("top_p", "val_top_p"), ("top_k", "val_top_k")):
        if sampling.get(theirs) is not None:
            t.put(f"{GENERATION}.{ours}", sampling[theirs], f"{EVALUATION}.sampling.{theirs}")
    answer = sampling.get("max_completion_tokens")
    if answer is not None and answer != t.get(f"{SAMPLING}.max_completion_tokens"):
        t.change(f"{EVALUATION}.sampling.max_completion_tokens={answer}", "answers have the same limit as in training")

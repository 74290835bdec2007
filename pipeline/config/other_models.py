"""Describe each model of a run besides the policy as a PolicyConfig, from which backends can be built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from pipeline.algorithms import build
from pipeline.algorithms.evaluate import JUDGED, only_scores
from pipeline.algorithms.served_models import ServedModelConfig
from pipeline.algorithms.teacher_assignment import SECTION, loaded_teachers
from pipeline.config.environments import KINDS, EnvironmentConfig, read_kwargs, scorers
from pipeline.config.generation import ColocatedConfig
from pipeline.config.megatron import MegatronLoRAConfig
from pipeline.config.policy import (
    LoRAConfig,
    PolicyConfig,
    RouterReplayConfig,
    ServedJudgeConfig,
    TeacherConfig,
    TokenizerConfig,
    ValueConfig,
)
from pipeline.config.schema import Recipe, generates, trains
from pipeline.recipe.problems import Problem

LEAST_JUDGE_S = 30.0
"""Least timeout_s of an environment that asks the judge of the job."""
EngineModel = Literal["policy", "judge", "reward_model"]
"""The model that an engine of the generate component serves."""


def reward_environment(recipe: Recipe) -> str | None:
    """Return the key under `env` of the environment of kind reward_model; None if there is none or nothing is sampled."""
    if not generates(recipe):
        return None
    return next((name for name, environment in recipe.env.items() if environment.kind == "reward_model"), None)


def reward_model(recipe: Recipe) -> EnvironmentConfig | None:
    """Return the environment of kind reward_model that `reward_environment` names; None if it names none."""
    name = reward_environment(recipe)
    return recipe.env[name] if name is not None else None


def serves_rewards(recipe: Recipe) -> bool:
    """Return whether the reward model has ranks of its own. The job then has a reward component."""
    environment = reward_model(recipe)
    return environment is not None and environment.served_by == "reward"


def check_reward_model(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of environments with reward models."""
    models = [name for name, environment in recipe.env.items() if environment.kind == "reward_model"]
    if len(models) > 1:
        text = f"{' and '.join(models)} are of kind reward_model; expected one at most"
        yield Problem("env", "contradiction", text)
    for name, environment in recipe.env.items():
        key, kind, model = f"env.{name}.model_name", environment.kind, environment.model_name
        if kind == "reward_model" and model is None:
            yield Problem(key, "missing-value", "got null; expected the reward model's folder, or its Hugging Face name")
        if kind != "reward_model" and model is not None:
            yield Problem(key, "has-no-effect", f"got {model}; only kind reward_model has a model, not {kind or 'null'}")


def serves_judge(recipe: Recipe) -> bool:
    """Return whether a generative judge has ranks of its own during training. The job then has a judge component."""
    return generates(recipe) and trains(recipe) and recipe.judge.model_name is not None


def check_judge(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if environments ask a judge that the job does not serve, or if nothing can ask the judge."""
    model, asked, own = recipe.judge.model_name, [], False
    for name, environment in recipe.env.items():
        for scorer in scorers(name, environment):
            if scorer.kind != "llm_judge":
                own |= scorer.kind not in KINDS.built_in
                continue
            arguments, problems = read_kwargs(scorer.kwargs_key, scorer.kind, scorer.kwargs)
            own |= bool(problems)  # which may be of a judge that asks this model
            if not problems and arguments.url is None:
                asked.append(scorer.kwargs_key)
                yield from _check_asking(recipe, scorer.kwargs_key, name, arguments.max_tokens)
    if asked and not (generates(recipe) and trains(recipe)):
        message = f"got null; expected the url of an endpoint, since {recipe.algorithm} has no cluster.judge"
        yield Problem(f"{asked[0]}.url", "missing-value", message)
    elif asked and model is None:
        message = f"got null; expected the model that judges, since {asked[0]}.url is null. Try a model, or an endpoint's url"
        yield Problem("judge.model_name", "missing-value", message)
    elif model is not None and not (asked or own):
        message = f"got {model}, but no environment asks it. Try env.NAME.kind=llm_judge without kwargs.url"
        yield Problem("judge.model_name", "has-no-effect", message)


def _check_asking(recipe: Recipe, key: str, name: str, most: int) -> Iterator[Problem]:
    """Yield the problems of an environment that asks the judge of the job. key: of the kwargs. most: tokens of a reply."""
    room = recipe.judge.vllm_cfg.max_model_len
    for other, environment in recipe.env.items():
        waits = other == name or (environment.kind in KINDS and environment.kwargs.get("judge") == name)
        if waits and (given := environment.timeout_s) < LEAST_JUDGE_S:
            message = f"got {given:g} s; expected at least {LEAST_JUDGE_S:g} s, since an answer waits in the judge's engines"
            yield Problem(f"env.{other}.timeout_s", "too-small", f"{message} for others. Try env.{other}.timeout_s=600")
    if recipe.judge.model_name is not None and most >= room:
        message = f"got {most}; expected less than judge.vllm_cfg.max_model_len, {room}, which limits prompt and reply together"
        yield Problem(f"{key}.request.max_tokens", "too-large", f"{message}. Try judge.vllm_cfg.max_model_len={4 * most}")


def critic(recipe: Recipe) -> PolicyConfig:
    """Return PPO's critic as a policy's configuration."""
    value, random_init = recipe.value, recipe.policy.random_init
    own = {name: getattr(value, name) for name in ("max_grad_norm", "optimizer", "scheduler")}
    return _with_policy_layout(recipe, value, random_init, **own)


def teachers(recipe: Recipe) -> dict[str, TeacherConfig]:
    """Return name -> teacher that train ranks load: those of on_policy_distillation, or `teacher` alone under the name ""."""
    needs, several = build(recipe).needs, recipe.on_policy_distillation.teachers
    if needs.has_teachers and several:
        return {name: several[name] for name in loaded_teachers(recipe)}
    return {"": recipe.teacher} if needs.teacher_top_k else {}


def teacher_section(name: str) -> str:
    """Return the section of the recipe that describes the teacher with this name in the result of `teachers`."""
    return f"{SECTION}.teachers.{name}" if name else "teacher"


def teacher_policy(recipe: Recipe, model: TeacherConfig) -> PolicyConfig:
    """Return a teacher as a policy's configuration. Its model_name must not be null."""
    own = {"tokenizer": _own_tokenizer(model), "max_total_sequence_length": model.max_total_sequence_length}
    return _with_policy_layout(recipe, model, **own)


def teacher_policies(recipe: Recipe) -> dict[str, PolicyConfig]:
    """Return section of the recipe -> teacher as a policy's configuration, for all teachers that train ranks load."""
    named = {teacher_section(name): model for name, model in teachers(recipe).items() if model.model_name is not None}
    return {section: teacher_policy(recipe, model) for section, model in named.items()}


def reward_model_policy(recipe: Recipe) -> PolicyConfig:
    """Return the reward model as a policy's configuration. The recipe must have one."""
    environment = reward_model(recipe)
    assert environment is not None
    return _with_policy_layout(recipe, environment, tokenizer=_own_tokenizer(environment))


def judge_policy(recipe: Recipe) -> PolicyConfig:
    """Return the judge of an evaluation as a policy's configuration. It must be a model of the job, not an endpoint."""
    judge = recipe.evaluate.judge
    generation = replace(recipe.policy.generation, stop_token_ids=None)
    return _served(replace(recipe, policy=replace(recipe.policy, generation=generation)), judge)


def evaluated_reward_model(recipe: Recipe) -> PolicyConfig:
    """Return the reward model of an evaluation, which must have one, as a policy's configuration. Its backend is FSDP2."""
    policy = recipe.policy
    dtensor = replace(policy.dtensor_cfg, enabled=True, tensor_parallel_size=1)
    fsdp = replace(policy, dtensor_cfg=dtensor, megatron_cfg=replace(policy.megatron_cfg, enabled=False))
    return _served(replace(recipe, policy=fsdp), recipe.evaluate.reward_model)


def _served(recipe: Recipe, model: ServedModelConfig) -> PolicyConfig:
    tokenizer, length = _own_tokenizer(model), model.max_total_sequence_length
    generation = recipe.policy.generation
    generation = replace(generation, vllm_cfg=replace(generation.vllm_cfg, max_model_len=length))
    return _with_policy_layout(recipe, model, tokenizer=tokenizer, max_total_sequence_length=length, generation=generation)


def served_judge_policy(recipe: Recipe) -> PolicyConfig:
    """Return the judge that cluster.judge serves as a policy's configuration. The recipe must have one."""
    judge = recipe.judge
    own = {name: getattr(judge, name) for name in ("max_num_seqs", "vllm_cfg", "vllm_kwargs")}
    off = {"stop_token_ids": None, "stop_strings": None, "lora_refit": "merged", "colocated": ColocatedConfig()}
    generation = replace(recipe.policy.generation, **own, **off)
    tokenizer, length = _own_tokenizer(judge), judge.vllm_cfg.max_model_len
    return _with_policy_layout(recipe, judge, tokenizer=tokenizer, max_total_sequence_length=length, generation=generation)


def served_models(recipe: Recipe) -> dict[str, PolicyConfig]:
    """Return section of the recipe -> judge or reward model, for those that engines serve beside the policy."""
    if serves_judge(recipe):
        return {"judge": served_judge_policy(recipe)}
    if recipe.algorithm != "evaluate":
        return {}
    found: dict[str, PolicyConfig] = {}
    kinds = {task.kind for task in recipe.evaluate.tasks.values()}
    if recipe.evaluate.reward_model.model_name is not None and "preference" in kinds:
        found["evaluate.reward_model"] = evaluated_reward_model(recipe)
    if recipe.evaluate.judge.model_name is not None and not only_scores(recipe) and kinds & set(JUDGED):
        found["evaluate.judge"] = judge_policy(recipe)
    return found


def skipped_tasks(recipe: Recipe) -> dict[str, str]:
    """Return task -> reason why it is skipped, for the tasks of an evaluation that do not apply to its models."""
    reward_model, tasks = recipe.evaluate.reward_model.model_name, recipe.evaluate.tasks.items()
    if reward_model is None:
        why = "evaluate.reward_model.model_name is null, so no reward model scores preferences"
        return {name: why for name, task in tasks if task.kind == "preference"}
    if only_scores(recipe):
        why = "the evaluated model is a reward model, which does not generate"
        return {name: why for name, task in tasks if task.kind != "preference"}
    return {}


def engine_models(recipe: Recipe, engines: int) -> tuple[EngineModel, ...]:
    """Return the model of each of `engines` engines, first those of the evaluated model.

    If there are too few engines, the evaluated model has none.
    """
    if recipe.algorithm != "evaluate":
        return ("policy",) * engines
    served = served_models(recipe)
    others: list[EngineModel] = []
    if "evaluate.reward_model" in served:
        if only_scores(recipe):
            return ("reward_model",) * engines
        others += ["reward_model"] * recipe.evaluate.reward_model.engines
    if "evaluate.judge" in served:
        others += ["judge"] * recipe.evaluate.judge.engines
    policy: list[EngineModel] = ["policy"] * (engines - len(others))
    return (*policy, *others)


def models(recipe: Recipe) -> dict[str, PolicyConfig]:
    """Return section of the recipe -> configuration, for all models that the train backend computes."""
    found = {"policy": recipe.policy}
    needs = build(recipe).needs
    if needs.critic:
        found["value"] = critic(recipe)
    found |= teacher_policies(recipe)
    if name := reward_environment(recipe):
        found[f"env.{name}"] = reward_model_policy(recipe)
    return {section: model for section, model in found.items() if model.model_name is not None}  # null is refused elsewhere


def _own_tokenizer(model: EnvironmentConfig | ServedModelConfig | ServedJudgeConfig | TeacherConfig) -> TokenizerConfig:
    """Return the tokenizer of a model beside the policy: by default that of its folder."""
    given = model.tokenizer
    return TokenizerConfig(given.name or model.model_name or "", given.chat_template, given.chat_template_kwargs)


def _with_policy_layout(
    recipe: Recipe,
    model: ValueConfig | TeacherConfig | EnvironmentConfig | ServedModelConfig | ServedJudgeConfig,
    random_init: bool = False,
    **more: Any,
) -> PolicyConfig:
    """Return the policy's configuration with another model in it.

    The model keeps the policy's parallel layout, but gets no adapters, no replay or balancing of routing and none of
    Megatron-Core's own optimizer keys. The numbers of layers in the first and last pipeline stage apply only if it is the
    policy's own model.
    """
    policy = recipe.policy
    own: dict[str, Any] = {"optimizer": None, "scheduler": None, "peft": MegatronLoRAConfig()}
    if model.model_name != policy.model_name:
        own |= {"num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None}
    return replace(
        policy,
        model_name=model.model_name,
        random_init=random_init,
        hf_config_overrides=model.hf_config_overrides,
        precision=model.precision,
        freeze_parameters=[],
        router_replay=RouterReplayConfig(),
        moe_aux_loss_coeff=0.0,
        dtensor_cfg=replace(policy.dtensor_cfg, lora_cfg=LoRAConfig()),
        megatron_cfg=replace(policy.megatron_cfg, **own),
        **more,
    )

"""Check that the keys of a recipe's sections for libraries are the libraries' options.

The checks read the source of installed libraries. For libraries that are not installed here, the job reports errors. The
meaning of values is not checked.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Any

from launch.executors.containers import runtime
from launch.preflight import bounded, installed, signatures, user_imports
from launch.recipes.model_files import read_json
from pipeline.algorithms import build
from pipeline.config import (
    OptimizerConfig,
    PolicyConfig,
    Problem,
    Recipe,
    aliases,
    generates,
    serves_judge,
    trains,
    uses_megatron,
)
from pipeline.models import rope
from pipeline.models.config_values import ALIASES

VLLM_KWARGS = "policy.generation.vllm_kwargs"
ENGINE = "policy.generation"
SET_BY_KEYS = {  # vLLM's arguments that Hetstep sets -> the key to use
    "model": "policy.model_name",
    "hf_overrides": "policy.hf_config_overrides",
    "dtype": "policy.precision",
    "tensor_parallel_size": f"{ENGINE}.vllm_cfg.tensor_parallel_size",
    "pipeline_parallel_size": f"{ENGINE}.vllm_cfg.pipeline_parallel_size",
    "enable_expert_parallel": f"{ENGINE}.vllm_cfg.expert_parallel_size",
    "max_model_len": f"{ENGINE}.vllm_cfg.max_model_len",
    "max_num_seqs": f"{ENGINE}.max_num_seqs",
    "gpu_memory_utilization": f"{ENGINE}.vllm_cfg.gpu_memory_utilization",
    "enforce_eager": f"{ENGINE}.vllm_cfg.enforce_eager",
    "enable_prefix_caching": f"{ENGINE}.vllm_cfg.enable_prefix_caching",
}
FIXED = {  # vLLM's arguments that cannot be set -> the reason
    "load_format": "weights come from the train ranks",
    "skip_tokenizer_init": "prompts and answers are token ids",
    "tokenizer": "prompts and answers are token ids",
    "generation_config": "policy.generation sets the sampling",
    "seed": "the pipeline derives the seed of each request from the algorithm's seed",
    "logprobs_mode": "training needs log-probs after temperature",
    "distributed_executor_backend": "the job starts the ranks",
    "data_parallel_size": "engines are independent; cluster.generate determines their number",
    "disable_log_stats": "the run's metrics need these statistics",
}
MODEL_OPTIONS = (  # Megatron's options that config.json gives and the conversion of weights relies on
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_router_topk"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("normalization", "gated_linear_unit", "activation_func", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
)
RUN_OPTIONS = {  # Megatron's options that this backend sets -> the reason
    "params_dtype": "it is policy.precision",
    "bf16": "it is policy.precision",
    "fp16": "it is policy.precision",
    "variable_seq_lengths": "microbatches differ in their number of tokens",
    "calculate_per_token_loss": "Hetstep divides the losses before Megatron-Core adds them",
    "moe_z_loss_coeff": "the router's loss would be divided by another count than the policy's loss",
    "attention_dropout": "dropout would add noise to the probability ratios",
    "hidden_dropout": "dropout would add noise to the probability ratios",
}
MEGATRON_ADAM = ("lr", "betas", "eps", "weight_decay", "fused", "foreach")  # pipeline/train/megatron/distributed_optimizer.py
MEGATRON_OPTIMIZERS = ("torch.optim.AdamW", "torch.optim.Adam")
UNFIT = {  # classes of torch that a recipe cannot use -> the reason
    "torch.optim.Optimizer": "is the base class of optimizers",
    "torch.optim.LBFGS": "computes the loss several times in a step",
    "torch.optim.SparseAdam": "needs sparse gradients",
    "torch.optim.Rprop": "does not support weights that are sharded over ranks",
    "torch.optim.Adafactor": "has state with other shapes than the weights, which checkpoints do not store",
    "torch.optim.lr_scheduler.LRScheduler": "is the base class of schedules",
    "torch.optim.lr_scheduler.ReduceLROnPlateau": "depends on a metric, not on the step",
    "torch.optim.lr_scheduler.LambdaLR": "needs a function",
    "torch.optim.lr_scheduler.MultiplicativeLR": "needs a function",
    "torch.optim.lr_scheduler.SequentialLR": "needs schedules; a list of schedules ending in {milestones: [...]} replaces it",
    "torch.optim.lr_scheduler.ChainedScheduler": "needs schedules",
}
EVERY_MODEL = ("num_labels", "torch_dtype", "vocab_size")  # keys that transformers' configurations accept besides their fields
MUON = "torch.optim.Muon"
BESIDE = "The policy's optimizer can also be in policy.megatron_cfg.optimizer"
RATES = ("lr", "weight_decay", "eps")
PLAIN = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of the options for vLLM, Megatron-Core and torch."""
    policy = recipe.policy
    if generates(recipe) and policy.generation.backend == "vllm":
        yield from _engine(VLLM_KWARGS, policy.generation.vllm_kwargs)
        if serves_judge(recipe):
            yield from _engine("judge.vllm_kwargs", recipe.judge.vllm_kwargs)
    yield from installed.problems(recipe)
    if not trains(recipe):
        return
    if uses_megatron(policy):
        yield from _megatron(policy.megatron_cfg.model_overrides)
    if not (uses_megatron(policy) and policy.megatron_cfg.optimizer is not None):
        yield from _optimizer("policy", policy.optimizer, uses_megatron(policy), recipe)
    if not (uses_megatron(policy) and policy.megatron_cfg.scheduler is not None):
        yield from _schedule("policy.scheduler", policy.scheduler)
    if build(recipe).needs.critic:
        yield from _optimizer("value", recipe.value.optimizer, uses_megatron(policy), recipe)
        yield from _schedule("value.scheduler", recipe.value.scheduler)


def notes(recipe: Recipe) -> Iterator[str]:
    """Yield a note on options that `problems` cannot check because their library is not installed on this machine."""
    policy = recipe.policy
    read_by = {"torch": ["policy.optimizer", "policy.scheduler"]} if trains(recipe) else {}
    if policy.generation.vllm_kwargs and generates(recipe):
        read_by["vllm"] = [VLLM_KWARGS]
    if policy.megatron_cfg.model_overrides and uses_megatron(policy):
        read_by["megatron"] = ["policy.megatron_cfg.model_overrides"]
    if trains(recipe) and not uses_megatron(policy) and _same_class(policy.optimizer.name, MUON):
        yield from _muon_notes("policy.optimizer.kwargs", policy.optimizer.kwargs)
    for library, keys in read_by.items():
        if importlib.util.find_spec(library) is None:
            yield f"not checked: the options in {' and '.join(keys)}, as {library} is not installed here"


def _unknown(key: str, names: Iterable[str], valid_names: Iterable[str], owner: str) -> Iterator[Problem]:
    valid_names = sorted(valid_names)
    for name in names:
        if name not in valid_names:
            near = aliases.option(name, valid_names)
            hint = f". Did you mean '{near}'?" if near else ". Leave it out"
            yield Problem(f"{key}.{name}", "unknown-key", f"{owner} has no such option{hint}")


def _forbidden(key: str, names: Iterable[str], reasons: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each of the options `names` that a recipe must not set. reasons: forbidden option -> why."""
    for name in names:
        if name in reasons:
            yield Problem(f"{key}.{name}", "contradiction", f"cannot be set: {reasons[name]}. Leave it out")


# ---- vLLM ---------------------------------------------------------------------------------------------------------------


def _engine(section: str, arguments: Mapping[str, Any]) -> Iterator[Problem]:
    own = section.removesuffix(".vllm_kwargs")
    keys = {name: key.replace(ENGINE, own) for name, key in SET_BY_KEYS.items()}
    keys |= {name: key.replace("policy.", f"{own}.") for name, key in keys.items() if own == "judge"}
    yield from _forbidden(section, arguments, FIXED | {name: f"{key} sets this" for name, key in keys.items()})
    if not arguments or (known := _known_parameters("vllm.engine.arg_utils.EngineArgs")) is None:
        return
    yield from _unknown(section, arguments, known, "the installed vLLM")
    for name in arguments:
        if name in known and not _fits(str(known[name].annotation), arguments[name]):
            message = f"got {arguments[name]!r}; expected vLLM's type {known[name].annotation}"
            yield Problem(f"{section}.{name}", "wrong-type", message)


def _known_parameters(dotted: str) -> Mapping[str, Parameter] | None:
    """Return a class's parameters; None if they are not known or this version has no such class, which the job reports."""
    try:
        signature = signatures.signature(dotted)
    except signatures.NoSuchClass:
        return None
    return signature.parameters if signature else None


def _fits(annotation: str, value: Any) -> bool:
    """Return whether a YAML value fits an annotation such as `int | None`; True for annotations that cannot be checked."""
    kinds = [kind.strip() for kind in annotation.split("|")]
    types = {PLAIN[kind] for kind in kinds if kind in PLAIN}
    return len(types) < len(kinds) or type(value) in types or (type(value) is int and float in types)


# ---- Megatron-Core ------------------------------------------------------------------------------------------------------


def _megatron(arguments: Mapping[str, Any]) -> Iterator[Problem]:
    key = "policy.megatron_cfg.model_overrides"
    model = dict.fromkeys(MODEL_OPTIONS, "config.json gives it, and the conversion of weights relies on it")
    yield from _forbidden(key, arguments, RUN_OPTIONS | model)
    if not arguments:
        return
    module = "megatron.core.transformer.transformer_config"
    config, mla_config = _known_parameters(f"{module}.TransformerConfig"), _known_parameters(f"{module}.MLATransformerConfig")
    if config is not None and mla_config is not None:
        yield from _unknown(key, arguments, {**config, **mla_config}, "the installed Megatron-Core")


# ---- torch --------------------------------------------------------------------------------------------------------------


def _optimizer(section: str, optimizer: OptimizerConfig, megatron: bool, recipe: Recipe) -> Iterator[Problem]:
    key, name, kwargs = f"{section}.optimizer", optimizer.name, optimizer.kwargs
    muon = _same_class(name, MUON)
    rates = {option: kwargs.get(option, 0) for option in RATES}
    if muon and isinstance(kwargs.get("adamw"), Mapping):
        rates |= {f"adamw.{option}": kwargs["adamw"].get(option, 0) for option in RATES}
    for option, value in rates.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            yield Problem(f"{key}.kwargs.{option}", "wrong-type", f"got {value!r}; expected a finite number of at least 0")
    if megatron:
        if name not in MEGATRON_OPTIMIZERS:
            message = f"got {name}; expected {' or '.join(MEGATRON_OPTIMIZERS)} with the Megatron backend"
            other = "FSDP2 has Muon: try policy.dtensor_cfg.enabled=true" if muon else BESIDE
            yield Problem(f"{key}.name", "unsupported", f"{message}. {other}")
        else:
            yield from _unknown(f"{key}.kwargs", kwargs, MEGATRON_ADAM, "Megatron-Core's Adam")
        return
    if muon:
        yield from _torch_class(key, MUON, {n: v for n, v in kwargs.items() if n != "adamw"}, "params", MUON)
        yield from _of_adamw(f"{key}.kwargs.adamw", kwargs.get("adamw"))
        return
    another_python = runtime.has_another_python(recipe.cluster.train)
    yield from _torch_class(key, name, kwargs, "params", "torch.optim.AdamW", user_imports.searched(recipe), another_python)
    if kwargs.get("fused") and any(_same_class(name, f"torch.optim.{other}") for other in ("SGD", "Adagrad")):
        message = f"got true; the fused kernel of {name} does not support weights that are sharded over ranks. Try foreach=true"
        yield Problem(f"{key}.kwargs.fused", "unsupported", message)


def _muon_notes(key: str, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note if Muon's and AdamW's rates are the same number with different meanings."""
    adamw = kwargs.get("adamw")
    if kwargs.get("adjust_lr_fn") != "match_rms_adamw" and "lr" not in (adamw if isinstance(adamw, Mapping) else {}):
        yield (
            f"{key}.adamw.lr: not given, so AdamW trains embeddings, heads and vectors with Muon's {key}.lr. Muon's updates of"
            " matrices are smaller than AdamW's at the same rate; with adjust_lr_fn=match_rms_adamw they are as large"
        )


def _of_adamw(key: str, options: Any) -> Iterator[Problem]:
    """Check the options of AdamW, which trains what Muon does not."""
    if not isinstance(options, Mapping | None):
        message = f"got {options!r}; expected a mapping of options of torch.optim.AdamW, such as {{lr: 3e-4}}"
        yield Problem(key, "wrong-type", message)
    elif options and (known := _known_parameters("torch.optim.AdamW")) is not None:
        yield from _options(key, options, {n: p for n, p in known.items() if n != "params"}, "torch.optim.AdamW")


def _torch_class(
    key: str,
    name: str,
    kwargs: Mapping[str, Any],
    model_argument: str,
    example: str,
    folders: Sequence[Path] = (),
    another_python: bool = True,
) -> Iterator[Problem]:
    """Check the name of an optimizer's or schedule's class, and its kwargs.

    model_argument: the parameter for which the backend passes a value. example: a valid name for messages. folders: where the
    user's modules are. another_python: whether the ranks may have modules that are missing here.
    """
    if "." not in name:
        yield Problem(f"{key}.name", "bad-format", f"got '{name}'; expected the dotted path of a class, such as {example}")
        return
    if reason := next((reason for unfit, reason in UNFIT.items() if _same_class(name, unfit)), None):
        yield Problem(f"{key}.name", "unsupported", f"got {name}, which {reason}. Try {example}")
        return
    library = name.partition(".")[0]
    if library != "torch" and not another_python and signatures.module_spec(library, folders) is None:
        places = ", ".join(dict.fromkeys(["installed packages", *map(str, folders)]))
        message = f"got {name}; there is no module {library}; looked in {places}. Try module_folders=[FOLDER], or {example}"
        yield Problem(f"{key}.name", "not-importable", message)
        return
    try:
        parameters = _parameters(name, folders)
    except signatures.NoSuchClass:
        owner = f"the installed {library}" if signatures.module_spec(library) else f"{name.rpartition('.')[0]}"
        message = f"got '{name}', which {owner} does not have; expected a class such as {example}"
        yield Problem(f"{key}.name", "not-a-choice", message)
        return
    if parameters is not None:
        parameters = {other: parameter for other, parameter in parameters.items() if other != model_argument}
        yield from _options(f"{key}.kwargs", kwargs, parameters, name)
        needed = [other for other, parameter in parameters.items() if parameter.default is parameter.empty]
        if absent := [other for other in needed if other not in kwargs]:
            yield Problem(f"{key}.kwargs.{absent[0]}", "missing-value", f"{name} needs {', '.join(absent)}")


def _parameters(name: str, folders: Sequence[Path]) -> Mapping[str, Parameter] | None:
    """Return a class's parameters; None if they are not known. A user's source is read in a fork with limits.

    Raises NoSuchClass.
    """
    if signatures.module_spec(name.partition(".")[0]) is not None:
        signature = signatures.signature(name)
        return signature.parameters if signature else None

    def read() -> list[tuple[str, int, str | None]] | bool | None:
        try:
            signature = signatures.signature(name, tuple(folders))
        except signatures.NoSuchClass:
            return False
        if signature is None:
            return None
        parameters = signature.parameters.values()
        return [(p.name, p.kind.value, None if p.default is p.empty else str(p.default)) for p in parameters]

    try:
        rows = bounded.call(read)
    except (bounded.Unbounded, SyntaxError):  # the trial and the ranks report why
        return None
    if rows is False:
        raise signatures.NoSuchClass(name)
    kinds = {kind.value: kind for kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_ONLY)}
    return rows and {
        other: Parameter(other, kinds[kind], default=Parameter.empty if text is None else signatures.SourceText(text))
        for other, kind, text in rows
    }


def _options(key: str, kwargs: Mapping[str, Any], parameters: Mapping[str, Parameter], owner: str) -> Iterator[Problem]:
    """Yield options that a class does not have, and options of another kind than their defaults."""
    yield from _unknown(key, kwargs, parameters, owner)
    for name, value in kwargs.items():
        default = _literal(parameters[name].default) if name in parameters and name not in RATES else None
        if (expected := _unlike(value, default)) is not None:
            yield Problem(f"{key}.{name}", "wrong-type", f"got {value!r}; expected {expected}. The default is {default}")


def _literal(default: Any) -> Any:
    """Return the value of a default's source; None if it is no literal."""
    try:
        return ast.literal_eval(default) if isinstance(default, str) else None
    except (ValueError, SyntaxError):
        return None


def _unlike(value: Any, default: Any) -> str | None:
    """Return what is expected if a value is of another kind than a default that is a tuple, a number, a text or a bool."""
    if isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and len(value) == len(default)
        return None if fits else f"a list of {len(default)} values"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        return None if isinstance(value, int | float) and not isinstance(value, bool) else "a number"
    return None


def _same_class(name: str, public: str) -> bool:
    """Return whether `name` is the class of torch with the dotted name `public`, or that class in a submodule."""
    package, _, cls = public.rpartition(".")
    return name == public or (name.startswith(f"{package}.") and name.endswith(f".{cls}"))


def _schedule(key: str, schedule: Any) -> Iterator[Problem]:
    """Check a schedule: null, one {name, kwargs}, or a list of these that ends with {milestones: [...]}, as in NeMo-RL."""
    if schedule is None:
        return
    parts = [schedule]
    if isinstance(schedule, list):
        *parts, last = schedule or [None]
        steps = last.get("milestones") if isinstance(last, dict) and set(last) == {"milestones"} else None
        numbers = isinstance(steps, list) and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in steps)
        if steps is None or not numbers or len(steps) != len(parts) - 1 or sorted(steps) != steps:
            message = (
                "expected a list of schedules {name, kwargs} that ends in {milestones: [...]}, the steps at which the second"
            )
            yield Problem(key, "bad-format", f"{message} and later schedules begin, in ascending order")
            return
    for number, part in enumerate(parts):
        name = f"{key}[{number}]" if isinstance(schedule, list) else key
        kwargs = part.get("kwargs") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(part.get("name"), str) or set(part) - {"name", "kwargs"}:
            message = f"got {part!r}; expected a schedule {{name, kwargs}}, such as torch.optim.lr_scheduler.LinearLR"
            yield Problem(name, "bad-format", message)
        elif not isinstance(kwargs, dict | None):
            message = f"got {kwargs!r}; expected a mapping of arguments for {part['name']}"
            yield Problem(f"{name}.kwargs", "wrong-type", message)
        else:
            yield from _torch_class(name, part["name"], kwargs or {}, "optimizer", "torch.optim.lr_scheduler.LinearLR")


# ---- transformers ---------------------------------------------------------------------------------------------------------


def unknown_overrides(section: str, policy: PolicyConfig, folder: Path) -> Iterator[Problem]:
    """Yield keys of hf_config_overrides that the model's configuration does not have."""
    if policy.hf_config_overrides:
        model = read_json(folder / "config.json")
        yield from _unknown_overrides(f"{section}.hf_config_overrides", policy.hf_config_overrides, model)


def _unknown_overrides(key: str, overrides: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[Problem]:
    for name, value in overrides.items():
        if name.endswith("_config") and isinstance(value, dict) and isinstance(model.get(name), dict):
            yield from _unknown_overrides(f"{key}.{name}", value, model[name])
    if (fields := _configuration(model.get("model_type"))) is not None:
        fields_of_model = {*model, *fields}
        if "rope_parameters" in fields:  # transformers reads the other spellings too
            fields_of_model |= {rope.SCALING, rope.THETA}
        yield from _unknown(key, overrides, fields_of_model, f"a {model['model_type']} configuration")


def unknown_parts(key: str, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a family or an activation function of config.json that the installed transformers does not have."""
    family, families = model.get("model_type"), set(ALIASES)
    for name in ("auto_mappings", "configuration_auto"):
        families |= _quoted_names(f"transformers.models.auto.{name}")
    if len(families) > len(ALIASES) and family not in families:
        near = difflib.get_close_matches(str(family), families, 1)
        hint = f"Did you mean '{near[0]}'?" if near else "Try a newer transformers"
        yield Problem(
            key, "unsupported", f"config.json has model_type={family!r}, which the installed transformers does not have. {hint}"
        )
    functions = _quoted_names("transformers.activations")
    if functions and (activation := model.get("hidden_act")) is not None and activation not in functions:
        message = (
            f"config.json has hidden_act={activation!r}, which transformers does not have; expected, for example, silu or gelu"
        )
        yield Problem(key, "unsupported", message)


def _quoted_names(dotted: str) -> set[str]:
    """Return the names in quotes in a module, such as its registry's keys; none if it is not installed."""
    spec = signatures.module_spec(dotted)
    return set(re.findall(r'"([a-z][a-z0-9_.-]*)"', Path(spec.origin).read_text())) if spec and spec.origin else set()


def _configuration(family: str | None) -> dict[str, Any] | None:
    """Return the keys of a family's configuration; None if transformers is not installed or lacks the family."""
    if not family or not family.isidentifier():
        return None
    dotted = f"transformers.models.{family}.configuration_{family}"
    base = _known_parameters("transformers.configuration_utils.PreTrainedConfig")
    tree = signatures.module(dotted)
    if base is None or tree is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _assigned_value(node, "model_type") == family:
            names = _assigned_value(node, "attribute_map") or {}
            names = {**names, **dict.fromkeys((*names.values(), *EVERY_MODEL))}
            return {**base, **signatures.fields(dotted, node), **names}
    return None


def _assigned_value(node: ast.ClassDef, name: str) -> Any:
    """Return the value of the literal that a class body assigns to a name; None if it assigns no literal."""
    for item in node.body:
        if isinstance(item, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in item.targets):
            try:
                return ast.literal_eval(item.value)
            except ValueError:
                return None
    return None

"""Compute learning rates with NeMo-RL's own code: `python -m tests.train.peer_schedules NEMO_RL MEGATRON_BRIDGE`.

Both are git checkouts; Megatron-Bridge at the commit that NeMo-RL has as a submodule. Their functions run as they stand, cut
out of their files by name, because importing them needs Ray and GPUs. The rates are written to golden/schedules.json with
where they come from; their code is not.
"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from pipeline.config import config_tree, interpolation

GOLDEN = Path(__file__).parent / "golden" / "schedules.json"
STEPS, PPO_STEPS = 30, 9

WORKERS = "nemo_rl/models/policy/workers"
VALUES = "nemo_rl/models/value/workers"
TRAIN = {  # (model, backend) -> file of the worker whose train() advances the schedule
    ("policy", "dtensor"): f"{WORKERS}/dtensor_policy_worker_v2.py",
    ("policy", "dtensor_v1"): f"{WORKERS}/dtensor_policy_worker.py",
    ("policy", "megatron"): f"{WORKERS}/megatron_policy_worker.py",
    ("value", "megatron"): f"{VALUES}/megatron_value_worker.py",
}
SETUP = "nemo_rl/models/automodel/setup.py"  # makes the schedule for dtensor
CONFIG, OPTIM = "src/megatron/bridge/training/config.py", "src/megatron/bridge/training/optim.py"  # for Megatron

MEGATRON = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"]
SCHEDULER = "policy.megatron_cfg.scheduler"
CASES: list[tuple[str, str, list[str]]] = [  # (recipe in examples/configs, the model, changes)
    ("grpo_math_8B.yaml", "policy", []),
    ("grpo_math_8B_megatron.yaml", "policy", []),
    ("recipes/llm/dapo-qwen2.5-7b.v2.yaml", "policy", ["policy.dtensor_cfg.context_parallel_size=1"]),  # what Hetstep has
    ("recipes/llm/dapo-qwen2.5-7b.v2.yaml", "policy", MEGATRON),
    ("recipes/llm/grpo-deepscaler-1.5b-8K.yaml", "policy", []),
    ("recipes/llm/grpo-deepscaler-1.5b-8K.yaml", "policy", MEGATRON),
    ("grpo_math_8B_megatron.yaml", "policy", [f"{SCHEDULER}.lr_decay_style=cosine", f"{SCHEDULER}.lr_decay_iters=25"]),
    ("grpo_math_8B_megatron.yaml", "policy", [f"{SCHEDULER}.lr_decay_iters=9"]),  # shorter than the warm-up
    ("ppo_math_1B_megatron.yaml", "policy", []),
    ("ppo_math_1B_megatron.yaml", "value", []),
    ("ppo_math_1B_megatron.yaml", "value", ["value.megatron_cfg.scheduler.lr_warmup_init=0.0"]),
    (
        "ppo_math_1B_megatron.yaml",
        "policy",
        [f"{SCHEDULER}.lr_decay_style=linear", f"{SCHEDULER}.lr_decay_iters=null", "ppo.max_num_steps=8"],
    ),
]


def main(nemo_rl: Path, bridge: Path) -> None:
    made = {
        "made_by": "python -m tests.train.peer_schedules NEMO_RL MEGATRON_BRIDGE",
        "sources": [
            {"repository": "https://github.com/NVIDIA-NeMo/RL", "commit": _commit(nemo_rl)},
            {"repository": "https://github.com/NVIDIA-NeMo/Megatron-Bridge", "commit": _commit(bridge)},
        ],
        "versions": {"torch": torch.__version__, "megatron-core": megatron.core.__version__},
        "cases": [_case(nemo_rl, bridge, *case) for case in CASES],
    }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{len(made['cases'])} cases in {GOLDEN}")


def _case(nemo_rl: Path, bridge: Path, recipe: str, model: str, changes: list[str]) -> dict[str, Any]:
    path = nemo_rl / "examples/configs" / recipe
    tree = config_tree.load_with_parents(path)
    for key, node in config_tree.parse_overrides(changes):
        tree.set(key, node)
    if problems := interpolation.resolve(tree):
        raise SystemExit("\n".join(problems))
    whole = tree.plain()
    config = whole[model]
    algorithm = "ppo" if whole.get("ppo") else "grpo"
    section = whole[algorithm]
    backend = "megatron" if config["megatron_cfg"]["enabled"] else "dtensor"
    worker = backend if backend == "megatron" or config["dtensor_cfg"].get("_v2", True) else "dtensor_v1"
    calls = section.get("ppo_epochs", 4) if algorithm == "ppo" else 1
    samples = section["num_prompts_per_step"] * section["num_generations_per_prompt"]
    iters = section["max_num_steps"] * calls
    file = TRAIN[model, worker]
    made = _megatron(bridge, config, iters) if backend == "megatron" else _dtensor(nemo_rl, worker, config)
    function = {"dtensor": f"{SETUP}, `if 'scheduler' in config`", "dtensor_v1": f"{file}, `if 'scheduler' in self.cfg`"}
    return {
        "recipe": f"examples/configs/{recipe}",
        "changes": changes,
        "model": model,
        "backend": backend,
        "functions": [
            function.get(worker, f"Megatron-Bridge {CONFIG}, _calculate_scheduler_steps; {OPTIM}, _get_scheduler"),
            f"{file}, train()",
        ],
        "train_calls_per_step": calls,
        "updates_per_train_call": samples // whole["policy"]["train_global_batch_size"],
        "inputs": _inputs(whole, algorithm, model, backend),
        "lr": list(
            _rates(nemo_rl / file, made, config["train_global_batch_size"], PPO_STEPS * calls if algorithm == "ppo" else STEPS)
        ),
    }


def _inputs(whole: dict[str, Any], algorithm: str, model: str, backend: str) -> dict[str, Any]:
    """Return all values of the resolved recipe that the rates depend on."""
    keys = ("num_prompts_per_step", "num_generations_per_prompt", "max_num_steps", "ppo_epochs")
    config: dict[str, Any] = {"train_global_batch_size": whole[model]["train_global_batch_size"]}
    if backend == "megatron":
        config["megatron_cfg"] = {name: whole[model]["megatron_cfg"][name] for name in ("optimizer", "scheduler")}
    else:
        config |= {name: whole[model][name] for name in ("optimizer", "scheduler")}
    return {algorithm: {key: whole[algorithm][key] for key in keys if key in whole[algorithm]}, model: config}


# ---- their code ---------------------------------------------------------------------------------------------------------


def _dtensor(nemo_rl: Path, worker: str, config: dict[str, Any]) -> SimpleNamespace:
    """Run `optimizer` and `scheduler` through their statement that makes a schedule of the recipe's keys."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = _get_class(config["optimizer"]["name"])([parameter], **config["optimizer"]["kwargs"])
    made = SimpleNamespace(cfg=config, optimizer=optimizer, scheduler=None)
    file, text = (
        (SETUP, "'scheduler' in config") if worker == "dtensor" else (TRAIN["policy", worker], "'scheduler' in self.cfg")
    )
    names = {
        "config": config,
        "optimizer": optimizer,
        "self": made,
        "torch": torch,
        "get_class": _get_class,
        "cast": lambda _, value: value,
    }
    (statement,) = (
        node
        for node in ast.walk(_parsed(nemo_rl / file))
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith(text)
    )
    _run(statement, file, names)
    made.scheduler = made.scheduler or names["scheduler"]
    return made


def _megatron(bridge: Path, config: dict[str, Any], train_iters: int) -> SimpleNamespace:
    """Run `optimizer` and `scheduler` through Megatron-Bridge's functions; train_iters as in the algorithm's setup()."""
    names: dict[str, Any] = {"OptimizerParamScheduler": OptimizerParamScheduler, "warnings": warnings}
    for file, function in ((CONFIG, "_calculate_scheduler_steps"), (OPTIM, "_get_scheduler")):
        (node,) = (
            node for node in ast.walk(_parsed(bridge / file)) if isinstance(node, ast.FunctionDef) and node.name == function
        )
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
        _run(node, file, names)
    unset = dict.fromkeys(
        ("max_steps", "lr_decay_iters", "lr_wsd_decay_iters", "lr_warmup_fraction", "wsd_decay_steps", "lr_wsd_decay_style")
    )
    unset |= {"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": True}
    scheduler = SimpleNamespace(**{**unset, **config["megatron_cfg"]["scheduler"]})
    train = SimpleNamespace(train_samples=None, train_iters=train_iters, global_batch_size=config["train_global_batch_size"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*capping lr_warmup_steps.*")
        names["_calculate_scheduler_steps"](SimpleNamespace(train=train, scheduler=scheduler))
    given = config["megatron_cfg"]["optimizer"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=given["lr"])
    made = names["_get_scheduler"](SimpleNamespace(lr=given["lr"], min_lr=given["min_lr"]), scheduler, optimizer)
    return SimpleNamespace(optimizer=optimizer, scheduler=made)


def _rates(file: Path, made: SimpleNamespace, gbs: int, calls: int) -> Iterator[float]:
    """Return the rate of each call of the worker's train(), which advances the schedule once, after its loop over global
    batches.
    """
    (train,) = (node for node in ast.walk(_parsed(file)) if isinstance(node, ast.FunctionDef) and node.name == "train")
    advances = [node for node in ast.walk(train) if isinstance(node, ast.Expr) and _advances(node)]
    in_a_loop = [
        node for loop in ast.walk(train) if isinstance(loop, ast.For | ast.While) for node in ast.walk(loop) if node in advances
    ]
    if len(advances) != 1 or in_a_loop:
        raise SystemExit(f"{file}: train() does not advance the schedule exactly once")
    for _ in range(calls):
        yield float(made.optimizer.param_groups[0]["lr"])
        made.optimizer.step()
        _run(advances[0], file.name, {"self": made, "gbs": gbs})


def _advances(node: ast.Expr) -> bool:
    return ast.unparse(node).startswith("self.scheduler.step(")


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _run(node: ast.stmt, file: str, names: dict[str, Any]) -> None:
    exec(compile(ast.Module([node], []), file, "exec"), names)


def _get_class(name: str) -> type:
    """Return the class of a dotted path, as hydra.utils.get_class does."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _commit(folder: Path) -> str:
    return subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))

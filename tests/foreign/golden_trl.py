"""Values that TRL's own parser computes for published commands: `python -m tests.foreign.golden_trl CLONE` writes them.

Needs TRL 1.16. Of each page or script, in the order of files, the first command of each trainer is taken, until TRL's parser
has accepted ten; some pages have fields of earlier versions.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from launch.recipes.trl import reading_trl
from launch.recipes.trl.trl_defaults import TRAINERS
from tests.foreign import trl_commands

FILE = Path(__file__).parent / "golden/trl.json"
MOST = 10


def chosen(root: Path) -> dict[str, str]:
    """Return name -> command."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for recipe in trl_commands.published(root):
        text = recipe.path.read_text().strip()
        start = reading_trl.starts(shlex.split(text))
        assert start is not None
        if "--config " not in text and "..." not in text:
            found.setdefault((recipe.name.partition(":")[0], start[1]), (recipe.name, text))
    return dict(found.values())


def of_trl(command: str, processes: int) -> dict[str, Any]:
    """Return the fields of TRL's dataclasses for a command, with what they derive, for a number of processes."""
    from transformers import TrainingArguments
    from trl.scripts import dpo, grpo, reward, rloo, sft  # pyright: ignore[reportMissingImports] optional package

    words = shlex.split(command)
    start = reading_trl.starts(words)
    assert start is not None
    first, trainer = start
    parser = {"dpo": dpo, "grpo": grpo, "reward": reward, "rloo": rloo, "sft": sft}[trainer].make_parser()
    TrainingArguments.world_size = property(lambda self: processes)  # type: ignore[method-assign]
    script, training, model, _ = parser.parse_args_and_config([*words[first:], "--output_dir", "x", "--bf16", "False"])
    names = {*TRAINERS[trainer], *vars(training)} - {"bf16"}
    values = {name: getattr(training, name) for name in sorted(names) if hasattr(training, name)}
    values |= {
        name: getattr(model, name) for name in ("model_name_or_path", "use_peft", "lora_r", "lora_alpha", "lora_dropout")
    }
    values |= {"reward_funcs": getattr(script, "reward_funcs", None), "dataset_name": script.dataset_name}
    plain = (int, float, str, bool, list, type(None))
    return {"trainer": trainer} | {name: value for name, value in values.items() if isinstance(value, plain)}


KEPT = (
    "trainer model_name_or_path use_peft lora_r lora_alpha lora_dropout reward_funcs dataset_name learning_rate"
    " weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm lr_scheduler_type warmup_steps"
    " per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps seed gradient_checkpointing"
    " eval_strategy eval_steps save_strategy save_steps num_generations generation_batch_size steps_per_generation"
    " num_iterations temperature top_p top_k beta epsilon epsilon_high delta loss_type scale_rewards"
    " importance_sampling_level mask_truncated_completions max_completion_length use_vllm vllm_mode"
    " vllm_gpu_memory_utilization vllm_importance_sampling_correction vllm_importance_sampling_mode"
    " vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min max_length label_smoothing"
    " center_rewards_coefficient packing"
)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    numbers = {}
    for name, command in chosen(Path(sys.argv[1])).items():
        processes = 8 if "--config_file" in command or "--accelerate_config" in command else 1
        try:
            values = of_trl(command, processes)
        except ValueError as error:
            print(f"TRL refuses {name}: {str(error)[:150]}")
            continue
        if len(numbers) == MOST:
            break
        numbers[name] = {
            "command": command,
            "processes": processes,
            "values": {k: values[k] for k in KEPT.split() if k in values},
        }
    FILE.write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"{len(numbers)} commands: {', '.join(numbers)}")

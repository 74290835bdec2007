"""`python -m tests.foreign.golden_verl CLONE`: write golden/verl.yaml from a clone of verl, with hydra-core installed.

    defaults   what Hydra composes from verl's files alone, for the keys of `verl_defaults`
    scripts    of each folder examples/*_trainer the first script for FSDP or Megatron-Core, in alphabetical order: the words
               that bash passes to the trainer, and what Hydra composes with them

bash runs a script with programs that only print their arguments, no environment but HOME and DEVICE=gpu, and no other programs
than date, dirname, basename and those of bash.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.recipes.translation import shell_script
from launch.recipes.translation.shell_script import MARK
from launch.recipes.verl import verl_defaults
from pipeline.config import yaml_text

GOLDEN = Path(__file__).parent / "golden/verl.yaml"
KINDS = {("ppo", "dp"): [], ("ppo", "megatron"): ["model_engine=megatron"]}
KINDS |= {("sft", "dp"): [], ("sft", "megatron"): ["engine=megatron", "optim=megatron"]}
HOME, CLONE = "/home/me", "/verl"
STUB = '#!/bin/sh\nprintf \'%s\\0\' "$0" "$@" >> "$HOME/words"\n'


def main(root: Path) -> None:
    defaults = {" ".join(kind): composed(root, kind[0], words, set(verl_defaults.of(*kind))) for kind, words in KINDS.items()}
    scripts = {}
    for path in first_scripts(root):
        words = passed_by_bash(path)
        assert words == found_by_reading(path), f"{path}: bash passes other words than the reader finds"
        kind = ("ppo", "megatron" if "model_engine=megatron" in words else "dp")
        config = composed(root, "ppo", words, set(verl_defaults.of(*kind)))
        changed = {key: value for key, value in config.items() if defaults[" ".join(kind)].get(key, ...) != value}
        scripts[str(path.relative_to(root / "examples"))] = {"words": words, "config": changed}
    head = "# Written by `python -m tests.foreign.golden_verl CLONE` from https://github.com/verl-project/verl, August 2026.\n"
    print(f"{len(scripts)} scripts: bash passes the words that the reader finds")
    GOLDEN.write_text(head + yaml_text.dump({"defaults": defaults, "scripts": scripts}))


def first_scripts(root: Path) -> list[Path]:
    """Return the first script of FSDP or Megatron-Core in each folder of a trainer."""
    found = []
    for folder in sorted((root / "examples").glob("*_trainer")):
        scripts = [path for path in sorted(folder.glob("*.sh")) if re.search(r"_(fsdp|megatron)$", path.stem)]
        found += scripts[:1]
    return found


def passed_by_bash(path: Path) -> list[str]:
    """Return the words that a script passes to the trainer."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("python3", "python", "uv", "torchrun", "mkdir", "ray"):
            (Path(folder) / name).write_text(STUB)
            (Path(folder) / name).chmod(0o755)
        for name in ("date", "dirname", "basename"):
            (Path(folder) / name).symlink_to(str(shutil.which(name)))
        environment = {"HOME": folder, "PATH": folder, "DEVICE": "gpu"}
        subprocess.run(["/bin/bash", str(path)], env=environment, capture_output=True, timeout=60, cwd=folder)
        words = (Path(folder) / "words").read_text().split("\0")
    at = max(number for number, word in enumerate(words) if word.startswith("verl.trainer"))
    dated = [re.sub(r"\d{8}_\d{4,6}", "DATE", word.replace(folder, HOME)) for word in words[at + 1 :] if word]
    return [word.replace(str(path.parents[2]), CLONE) for word in dated]


def found_by_reading(path: Path) -> list[str]:
    """Return the words that our reader finds without running the script."""
    environment = {"HOME": HOME, "DEVICE": "gpu"}
    command = shell_script.find_command(
        path.read_text(), path, lambda words: any(word.startswith("verl.trainer") for word in words), environment=environment
    )
    assert command is not None
    at = max(number for number, word in enumerate(command.words) if word.startswith("verl.trainer"))
    return [MARK.sub("DATE", word).replace(str(path.parents[2]), CLONE) for word in command.words[at + 1 :] if word]


def composed(root: Path, kind: str, words: list[str], keys: set[str]) -> dict[str, Any]:
    """Return dotted key -> value of Hydra's composition."""
    import hydra  # type: ignore[import-not-found]
    from omegaconf import OmegaConf

    name = "sft_trainer_engine" if kind == "sft" else "ppo_trainer"
    with hydra.initialize_config_dir(str(root / "verl/trainer/config"), version_base=None):
        config = hydra.compose(name, overrides=[*words, *([] if kind == "sft" else ["++actor_rollout_ref.rollout.name=vllm"])])
    return {key: found for key in sorted(keys) if (found := _value(OmegaConf.select(config, key, default="???"))) != "???"}


def _value(node: Any) -> Any:
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
    return dict(plain) if isinstance(plain, Mapping) else plain


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    main(Path(sys.argv[1]).resolve())

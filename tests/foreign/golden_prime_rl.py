"""`python -m tests.foreign.golden_prime_rl CLONE`: write golden/prime_rl.json from prime-rl's own pydantic classes.

Needs `pip install prime-pydantic-config renderers verifiers tomli tomli-w`, and packages/prime-rl-configs/src of the clone on
PYTHONPATH. The client of Prime Intellect's sandboxes, which configurations do not use, is an empty module. Of configs/**.toml,
in alphabetical order, the first ten that the classes accept are taken.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

FILE = Path(__file__).parent / "golden/prime_rl.json"
MOST = 10
INSTALLED = {"taskset": {"id": "harbor"}}
"""A taskset of verifiers itself, in place of those that a clone has as packages; none of the compared values depends on it."""
SANDBOXES = ("prime_sandboxes", "prime_sandboxes.models")
RL = (
    "trainer.model.name trainer.model.seq_len trainer.model.lora trainer.model.cp trainer.model.dp_replicate trainer.optim"
    " trainer.scheduler trainer.loss trainer.max_steps trainer.ckpt.interval trainer.ckpt.keep_last orchestrator.batch_size"
    " orchestrator.group_size orchestrator.seq_len orchestrator.max_off_policy_steps orchestrator.algo.type"
    " orchestrator.train.sampling.temperature orchestrator.train.sampling.max_completion_tokens"
    " orchestrator.train.filter_zero_advantages orchestrator.eval.interval orchestrator.eval.group_size"
    " inference.vllm.tensor_parallel_size inference.vllm.gpu_memory_utilization deployment"
)
SFT = "model.name model.lora model.cp optim scheduler max_steps data deployment ckpt.interval ckpt.keep_last"


def classes() -> tuple[Any, Any]:
    """Return prime-rl's classes of the configurations of `rl` and `sft`."""
    for name in SANDBOXES:
        sys.modules.setdefault(name, MagicMock())
    from prime_rl.configs.rl import RLConfig  # pyright: ignore[reportMissingImports] of a clone
    from prime_rl.configs.sft import SFTConfig  # pyright: ignore[reportMissingImports] of a clone

    return RLConfig, SFTConfig


def values(path: Path) -> dict[str, Any]:
    """Return the values that prime-rl's classes compute for a file. Raises ValueError if they refuse it."""
    rl, sft = classes()
    given = tomllib.loads(path.read_text())
    kind = "rl" if "orchestrator" in given else "sft"
    for section in (given.get("orchestrator", {}), given):
        for part in ("train", "eval"):
            for number, source in enumerate(section.get(part, {}).get("source", [])):
                section[part]["source"][number] = {**source, "env": INSTALLED}
    plain = (rl if kind == "rl" else sft).model_validate(given).model_dump(mode="json")
    found: dict[str, Any] = {"kind": kind}
    for key in (RL if kind == "rl" else SFT).split():
        value: Any = plain
        for part in key.split("."):
            value = None if value is None else value[part]
        found[key] = value
    return found


def main(root: Path) -> None:
    golden: dict[str, Any] = {}
    for path in sorted(root.glob("configs/**/*.toml")):
        name = str(path.relative_to(root))
        try:
            lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
            golden[name] = {"text": "\n".join(lines) + "\n", "values": values(path)}
        except (ValueError, ImportError) as error:
            print(f"prime-rl refuses {name}: {str(error)[:200]}")
        if len(golden) == MOST:
            break
    FILE.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{len(golden)} files: {', '.join(golden)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

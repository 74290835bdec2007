"""The table of prime-rl's defaults equals the fields of its classes, where its package is importable (`golden_prime_rl.py`)."""

from __future__ import annotations

from typing import Any

import pytest

from launch.recipes.prime_rl import prime_rl_defaults as ours
from tests.foreign import golden_prime_rl

pytest.importorskip("prime_rl.configs")


def fields(cls: Any) -> dict[str, Any]:
    """Return the defaults of a class of pydantic; of its sections too, by dotted key."""
    found = {}
    for name, field in cls.model_fields.items():
        value = field.get_default(call_default_factory=True)
        if hasattr(type(value), "model_fields"):
            found |= {f"{name}.{key}": below for key, below in fields(type(value)).items()}
        found[name] = value
    return found


def test_defaults() -> None:
    golden_prime_rl.classes()
    from prime_rl.configs import inference, orchestrator, rl, sft, trainer  # pyright: ignore[reportMissingImports] of a clone

    typed = {
        "optim": {"adamw": trainer.AdamWConfig, "muon": trainer.MuonConfig, "sgd": trainer.SGDConfig},
        "scheduler": {"linear": trainer.LinearSchedulerConfig, "cosine": trainer.CosineSchedulerConfig},
        "loss": {"default": trainer.DefaultLossConfig, "ipo": trainer.IPOLossConfig},
    }
    tables = {"optim": ours.OPTIMIZERS, "scheduler": ours.SCHEDULERS, "loss": ours.LOSSES}
    pairs = [(tables[name][kind], cls) for name, classes in typed.items() for kind, cls in classes.items()]
    pairs += [(ours.LORA, trainer.LoRAConfig), (ours.MODEL, trainer.ModelConfig), (ours.SFT_DATA, sft.SFTDataConfig)]
    pairs += [(ours.ORCHESTRATOR, orchestrator.OrchestratorConfig), (ours.EVAL, orchestrator.EvalConfig)]
    pairs += [(ours.DEPLOYMENT, rl.SingleNodeDeploymentConfig)]
    for table, cls in pairs:
        theirs = fields(cls)
        assert table and table == {key: theirs.get(key, "no field") for key in table}, cls
    served = fields(inference.InferenceConfig)
    assert {key: served.get(f"vllm.{key}", "no field") for key in ours.VLLM} == ours.VLLM
    assert fields(trainer.TrainerConfig)["ckpt"] is None and fields(trainer.TrainerConfig)["loss.type"] == "default"

"""`python -m tests.foreign.verl_numbers CLONE`: our loss for translated keys of verl beside verl's own functions, in float64.

Each row has the difference of the losses, and that of the gradients by the log-probs relative to the largest. verl's own
functions run from verl/trainer/ppo/core_algos.py of a clone, with empty modules for what they do not use. `k1+` and `k3+` have
the gradient of k2 by design, and so another value. Exits with 1 if a gradient differs.
"""

from __future__ import annotations

import ast
import importlib.util
import shlex
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

from launch.recipes import reading
from pipeline.algorithms.loss import policy_loss
from pipeline.algorithms.sections import LossConfig
from pipeline.types import Outputs
from tests.algorithms.golden.rows import Rows
from tests.foreign.test_verl_translation import ACTOR, BASE

PROMPT, LENGTHS = 3, (14, 9, 12, 7, 14, 5)
EQUAL = 1e-8  # verl adds 1e-8 to the lengths of sequences
KL = ("low_var_kl", "k3", "mse", "k3+", "k1+")
SEQUENCES = "seq-mean-token-mean"
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {  # verl's keys; the same as arguments of its functions
    "vanilla": ([], {}),
    "clip-higher, c=10": (["clip_ratio_high=0.28", "clip_ratio_c=10.0"], {"clip_ratio_high": 0.28, "clip_ratio_c": 10.0}),
    "mean over sequences": ([f"loss_agg_mode={SEQUENCES}"], {"aggregation": SEQUENCES}),
    "gspo": (
        ["policy_loss.loss_mode=gspo", "clip_ratio_low=3e-4", "clip_ratio_high=4e-4"],
        {"mode": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    ),
    "cispo": (["policy_loss.loss_mode=cispo", "clip_ratio_low=1.0"], {"mode": "cispo", "clip_ratio_low": 1.0}),
    "weights of tokens": (["algorithm.rollout_correction.rollout_is=token"], {"bound": 2.0}),
    "bypass_mode": (["algorithm.rollout_correction.bypass_mode=True"], {"bypasses": True}),
}
for _kind in KL:
    _words = ["use_kl_loss=True", "kl_loss_coef=0.05", f"kl_loss_type={_kind}"]
    CASES[f"KL {_kind}"] = (_words, {"kl": _kind})
    CASES[f"KL {_kind}, sequences"] = ([*_words, f"loss_agg_mode={SEQUENCES}"], {"kl": _kind, "aggregation": SEQUENCES})


class ActorConfig(dict[str, Any]):
    """verl's configuration of an actor, as far as its losses read it."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def core_algos(root: Path) -> Any:
    """Return verl's module of losses."""
    names = ("utils", "utils.torch_functional", "utils.import_utils", "trainer", "trainer.config", "workers", "workers.config")
    modules = {name: types.ModuleType(f"verl.{name}") for name in names}
    sys.modules["verl"] = types.ModuleType("verl")
    sys.modules.update({f"verl.{name}": module for name, module in modules.items()})
    modules["trainer.config"].__dict__["AlgoConfig"] = type("AlgoConfig", (), {})
    modules["workers.config"].__dict__["ActorConfig"] = ActorConfig
    modules["utils.import_utils"].__dict__["deprecated"] = lambda *_: lambda function: function
    functional = modules["utils.torch_functional"]
    modules["utils"].__dict__.update(as_torch_index=None, group_mean_std=None, torch_functional=functional)
    body = ast.parse((root / "verl/utils/torch_functional.py").read_text()).body
    used: list[ast.stmt] = [
        node for node in body if isinstance(node, ast.FunctionDef) and node.name in ("masked_sum", "masked_mean")
    ]
    functional.__dict__["torch"] = torch
    exec(compile(ast.Module(used, []), "torch_functional.py", "exec"), functional.__dict__)  # the rest needs a GPU's kernels
    spec = importlib.util.spec_from_file_location("core_algos", root / "verl/trainer/ppo/core_algos.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def translated(words: list[str]) -> LossConfig:
    """Return our section of the loss for keys of verl; those without a section are the actor's."""
    full = [word if word.startswith("algorithm.") else f"{ACTOR}.{word}" for word in words]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "run.sh"
        script.write_text(f"python3 -m verl.trainer.main_ppo {shlex.join([*BASE, *full])}\n")
        return reading.load(str(script)).loss_fn


def compare(core: Any, words: list[str], theirs: dict[str, Any]) -> tuple[float, float]:
    """Return (difference of the losses, relative difference of the gradients) of one case."""
    generator = torch.Generator().manual_seed(0)

    def near(base: torch.Tensor, scale: float) -> torch.Tensor:
        return base + scale * torch.randn(base.shape, generator=generator, dtype=torch.float64)

    mask = [[float(PROMPT <= column < length) for column in range(max(LENGTHS))] for length in LENGTHS]
    counted = torch.tensor(mask, dtype=torch.float64)
    logprobs = -3 * torch.rand(counted.shape, generator=generator, dtype=torch.float64)
    old, reference = near(logprobs, 0.4), near(logprobs, 0.5)
    drawn = near(old, 0.3)
    advantages = near(torch.zeros(len(LENGTHS), 1, dtype=torch.float64), 1.0).expand(counted.shape)

    rows = Rows({"lengths": LENGTHS, "token_mask": mask, "logprobs": logprobs.tolist()})
    leaf = rows.leaf("logprobs")
    fields = {"old_logprobs": old, "generate_logprobs": drawn, "advantages": advantages}
    fields |= {"reference_logprobs": reference} if "kl" in theirs else {}
    ours = policy_loss(translated(words), Outputs(logprobs=rows.packed(leaf)), rows.batch(**fields), rows.counts).loss
    (our_gradient,) = torch.autograd.grad(ours, leaf)

    again = logprobs.clone().requires_grad_()
    tokens = {"dp_size": 1, "batch_num_tokens": counted.sum(), "global_batch_size": len(LENGTHS), "loss_scale_factor": None}
    config = ActorConfig(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0, global_batch_info=tokens)
    config.update({key: value for key, value in theirs.items() if key.startswith("clip_")})
    aggregation = theirs.get("aggregation", "token-mean")
    loss, _ = core.get_policy_loss_fn(theirs.get("mode", "vanilla"))(
        old_log_prob=drawn if "bypasses" in theirs else old,
        log_prob=again,
        advantages=advantages,
        response_mask=counted,
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=torch.exp(old - drawn).clamp(max=theirs["bound"]) if "bound" in theirs else None,
    )
    if "kl" in theirs:
        kl = core.kl_penalty(again, reference, theirs["kl"])
        loss = loss + 0.05 * core.agg_loss(loss_mat=kl, loss_mask=counted, loss_agg_mode=aggregation, **tokens)
    (their_gradient,) = torch.autograd.grad(loss, again)
    largest = their_gradient.abs().max()
    return abs((loss - ours).item()), ((their_gradient - our_gradient).abs().max() / largest).item()


def main(root: Path) -> int:
    core = core_algos(root)
    found = {name: compare(core, *case) for name, case in CASES.items()}
    print("case                            loss  gradient")
    for name, (loss, gradient) in found.items():
        print(f"{name:28s} {loss:7.1e}  {gradient:8.1e}")
    return int(max(gradient for _, gradient in found.values()) > EQUAL)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))

"""Compare the plan with NeMo-RL's published whole steps: predicted and published, side by side.

    python -m tests.benchmarks.plan_published

GPUs are those of recipes/hardware/h100.yaml and gb200.yaml, with the efficiencies that they assume and their sources. The
ends of the printed ranges are these files' shortest_step and longest_step, which plans show.
None is fitted to these lines, but one choice was made with a first comparison at hand: a mixture's share of the peak was 0.25
before it became the mean of its sources, 0.20 (with 0.25 the ratios of mixtures are up to 0.2 higher). Layouts, batches and
lengths are the published ones; what was not published is said on the line.

The runs are planned as they ran. Most are colocated: the same GPUs train and generate in turn, and the trainer's state moves to
the host and back. Lines with "ahead" sample that many steps ahead of training, with refits in flight, on GPUs of their own.

Their refit is another program than ours: it gathers each tensor on all ranks, from Python. So its seconds are the published
ones of that model, not planned ones. Where theirs is not published, none is counted.

Sources: NeMo-RL's post "Reinforcement Learning with NVIDIA NeMo-RL: Megatron-Core Support for Optimized Training Throughput"
(v0.3, with phases and mean lengths of answers), and its performance summaries of v0.4 and v0.6 (whole steps and mean lengths of
sequences), and the recipes that these name, examples/configs of those releases. Refits in place: the phases of v0.3, and for
DeepSeek-V3 its post "Journey of Optimizing Weight Transfer in Large MoE Models by 10x" (47 s on 256 H100). Refits between GPUs:
its post "Optimizing Non-Colocated Refit for Asynchronous RL" (on H100).
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import yaml

from launch.plan import backend_choice
from launch.plan.estimate import Plan, plan
from launch.plan.roofline import Phase
from pipeline import config

GPUS = {"h100": 8, "gb200": 4}  # of a node
PROMPT = 265  # tokens: with Llama-3.1-8B on OpenMathInstruct-2, 1,060 of a sequence (v0.4) less 795 of an answer (v0.3)
KEY = "policy.megatron_cfg"
# theirs computes log-probs of all samples before the first update
FORCED = "grpo.seq_logprob_error_threshold=1000"
PHASES = ("train", "log-probs", "generate", "refit")
WEIGHTS = "weights to the engines"  # the phase of a refit


@dataclass(frozen=True)
class Line:
    """A published step; published_steps.yaml says what each field is."""

    what: str
    model: str
    gpus: int
    engine: int
    answer: float
    longest: int
    published: dict[str, float]
    layout: tuple[str, ...]
    assumed: str
    why: str = ""
    prompts: int = 64
    answers: int = 32
    ahead: int = 0
    generate: int = 0
    gpu: str = "h100"
    logprobs: int = 1
    utilization: float | None = None

    @property
    def refit(self) -> float:
        """Return the seconds of their refit, 0 if they are not published."""
        if "refit" in self.published:
            return self.published["refit"]
        return REFITS.get((self.gpu, self.model, self.ahead > 0), 0.0)


def megatron(tensor: int = 1, pipeline: int = 1, expert: int = 1, context: int = 1, recompute: bool = False) -> tuple[str, ...]:
    return (
        f"{KEY}.enabled=true",
        "policy.dtensor_cfg.enabled=false",
        f"{KEY}.tensor_model_parallel_size={tensor}",
        f"{KEY}.pipeline_model_parallel_size={pipeline}",
        f"{KEY}.expert_model_parallel_size={expert}",
        f"{KEY}.context_parallel_size={context}",
        f"{KEY}.sequence_parallel={str(tensor > 1).lower()}",
        f"{KEY}.activation_checkpointing={str(recompute).lower()}",
        f"{KEY}.distributed_data_parallel_config.grad_reduce_in_fp32=false",
    )


def stages(first: int, last: int) -> tuple[str, ...]:
    return f"{KEY}.num_layers_in_first_pipeline_stage={first}", f"{KEY}.num_layers_in_last_pipeline_stage={last}"


def dtensor(tensor: int) -> tuple[str, ...]:
    return (
        f"{KEY}.enabled=false",
        f"policy.dtensor_cfg.tensor_parallel_size={tensor}",
        "policy.dtensor_cfg.activation_checkpointing=false",
        "policy.dtensor_cfg.recompute_granularity=full",  # without effect
    )


def of_row(row: dict[str, Any]) -> Line:
    """Return the step of a row of published_steps.yaml."""
    given = {key: value for key, value in row.items() if key not in ("sequence", "megatron", "dtensor", "stages", "more")}
    layout = megatron(**row["megatron"]) if "megatron" in row else dtensor(row["dtensor"])
    layout = (*layout, *(stages(*row["stages"]) if "stages" in row else ()), *row.get("more", ()))
    return Line(layout=layout, **{"answer": row.get("sequence", PROMPT) - PROMPT, **given})


TABLE = yaml.safe_load((Path(__file__).parent / "published_steps.yaml").read_text())
REFITS = {(row["gpu"], row["model"], row["ahead"]): row["seconds"] for row in TABLE["refits"]}
LINES = [of_row(row) for row in TABLE["steps"]]


def predicted(line: Line) -> Plan:
    """Return the plan of a line, with the published seconds of its refit."""
    longest, generate = line.longest, line.generate or line.gpus
    train = line.gpus - line.generate
    recipe = config.load(
        "llama8b_grpo" if line.ahead else "llama8b_grpo_sync",
        [
            *line.layout,
            FORCED,
            "run_dir=runs/published",
            f"policy.model_name={line.model}",
            f"policy.generation.colocated.enabled={str(not line.ahead).lower()}",
            *(f"cluster.{name}.gpu={line.gpu}" for name in ("train", "generate")),
            *(f"cluster.{name}.gpus_per_node={GPUS[line.gpu]}" for name in ("train", "generate")),
            f"cluster.train.nodes={train // GPUS[line.gpu]}",
            f"cluster.generate.nodes={generate // GPUS[line.gpu]}",
            f"grpo.async_grpo.max_trajectory_age_steps={max(1, line.ahead)}",
            f"grpo.num_prompts_per_step={line.prompts}",
            f"grpo.num_generations_per_prompt={line.answers}",
            f"policy.max_total_sequence_length={longest}",
            f"policy.sequence_packing.train_mb_tokens={longest}",
            f"policy.sequence_packing.logprob_mb_tokens={line.logprobs * longest}",
            f"policy.logprob_batch_size={line.logprobs}",
            f"policy.generation.max_new_tokens={longest}",
            f"policy.generation.vllm_cfg.gpu_memory_utilization={line.utilization or (0.8 if line.ahead else 0.6)}",
            f"policy.generation.vllm_cfg.tensor_parallel_size={line.engine}",
            f"plan.prompt_tokens={PROMPT}",
            f"plan.answer_tokens={line.answer}",
        ],
    )
    found = plan(*backend_choice.choose(recipe))
    others = [phase for phase in found.phases if phase.name != WEIGHTS]
    return replace(found, phases=[*others, Phase("refit", WEIGHTS, 0.0, {"as published": line.refit})])


def by_phase(plan: Plan) -> dict[str, float]:
    """Return seconds by PHASES, and of the step."""
    found = dict.fromkeys(PHASES, 0.0) | {"step": plan.step}
    for phase in plan.phases:
        name = {"rollout": "generate", "train": "train", "refit": "refit"}[phase.clock]
        found["log-probs" if phase.name.startswith("log-probs") else name] += phase.seconds
    return found


def ratio(line: Line, seconds: float) -> float:
    """Return published over predicted."""
    return line.published["step"] / seconds


def print_published() -> None:
    print("\nsteps as published and as predicted, in seconds: published / predicted")
    print(f"{'':34s}" + "".join(f"{name:>14s}" for name in (*PHASES, "step")) + f"{'ratio':>8s}")
    last, ratios = None, dict[str, list[float]]()
    for line in LINES:
        last = predicted(line)
        seconds = by_phase(last)
        cells = (f"{line.published.get(name, '-')} / {seconds[name]:.3g}" for name in (*PHASES, "step"))
        print(f"{line.what:34s}" + "".join(f"{cell:>14s}" for cell in cells) + f"{ratio(line, seconds['step']):8.2f}")
        ratios.setdefault(line.gpu, []).append(ratio(line, seconds["step"]))
        texts = [
            f"{line.gpus} GPUs, {line.prompts} x {line.answers} answers of {line.answer:g} tokens; assumed: {line.assumed}"
        ]
        texts += [f"why: {line.why}"] if line.why else []
        texts += [] if last.fits else [f"does not fit: {text}" for text in (*last.problems(), *last.warnings())]
        for text in texts:
            print(textwrap.indent(textwrap.fill(text, 120), "    "))
    print_ranges(ratios)


def print_ranges(ratios: dict[str, list[float]]) -> None:
    """Print the ends that recipes/hardware/GPU.yaml has, and the geometric mean."""
    for gpu, found in ratios.items():
        print(f"{gpu}: {min(found):.2f} to {max(found):.2f}, geometric mean {geometric_mean(found):.2f}, {len(found)} steps")


if __name__ == "__main__":
    print_published()

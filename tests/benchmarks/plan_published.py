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
from statistics import geometric_mean

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
    what: str
    model: str
    gpus: int
    engine: int  # GPUs of one
    answer: float  # mean tokens
    longest: int  # policy.max_total_sequence_length
    published: dict[str, float]  # seconds by PHASES and "step"
    layout: tuple[str, ...]
    assumed: str
    why: str = ""  # why it is off by more than 2
    prompts: int = 64  # of a step
    answers: int = 32  # of each
    ahead: int = 0  # steps
    generate: int = 0  # GPUs, of those that sample ahead; the rest train
    gpu: str = "h100"
    logprobs: int = 1  # logprob_batch_size: sequences of the greatest length in a microbatch without gradients
    utilization: float | None = None  # gpu_memory_utilization; None: 0.8 ahead, else 0.6

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


def phases(train: float, logprobs: float, generate: float, refit: float, step: float) -> dict[str, float]:
    return {"train": train, "log-probs": logprobs, "generate": generate, "refit": refit, "step": step}


LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"
QWEN_32B, QWEN_30B, QWEN_235B = "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"
DEEPSEEK = "unsloth/DeepSeek-V3-bf16"
REFITS = {  # seconds, by (GPU, model, whether between GPUs)
    ("h100", DEEPSEEK, False): 47.0,
    ("h100", QWEN_30B, True): 1.5,
    ("h100", QWEN_235B, True): 5.0,
    ("h100", DEEPSEEK, True): 14.0,
}
FEW = (
    "the step alone is published, and the work is small, 512 sequences: the rest is what the plan leaves out, latencies of"
    " engines and of 8 stages with few microbatches, and their refit, which is not published for this GPU"
)
RACK = (
    "the step alone is published. Of Qwen3-30B-A3B on 16 GPUs a later release says 69 s of generation in a step of 182 s (pull"
    " request 3461), and the plan has 75 s. So their trainer takes about four times as long as planned, whose share of the peak"
    " is of pretraining with large batches and equally loaded experts; v0.3 on the H100 takes three times as long"
)
SMALL = "engines of 1 GPU: 256 answers each at once"

LINES = [
    Line(
        "v0.3, Llama-3.1-8B, Megatron",
        LLAMA_8B,
        8,
        1,
        795,
        4096,
        phases(28, 18, 58, 5, 112),
        megatron(),
        SMALL,
        logprobs=4,
    ),
    Line(
        "v0.3, Llama-3.1-8B, DTensor",
        LLAMA_8B,
        8,
        1,
        777,
        4096,
        phases(38, 19, 57, 4, 122),
        dtensor(1),
        SMALL,
        logprobs=2,
    ),
    Line(
        "v0.3, Llama-3.1-70B, Megatron",
        LLAMA_70B,
        64,
        4,
        398,
        4096,
        phases(28, 18, 84, 14, 147),
        megatron(tensor=4, pipeline=4),
        "engines of 4 GPUs, as in their recipe",
        logprobs=4,
    ),
    Line(
        "v0.3, Llama-3.1-70B, DTensor",
        LLAMA_70B,
        64,
        4,
        395,
        4096,
        phases(97, 28, 82, 15, 230),
        dtensor(8),
        "engines of 4 GPUs, as in their command; packed, where theirs pads batches of dynamic size",
    ),
    Line(
        "v0.3, Qwen3-32B, Megatron",
        QWEN_32B,
        64,
        4,
        3283,
        4096,
        phases(68, 40, 96, 7, 213),
        megatron(tensor=4, pipeline=2),
        "engines of 4 GPUs, as in their recipe",
    ),
    Line(
        "v0.3, Qwen3-30B-A3B, Megatron",
        QWEN_30B,
        64,
        4,
        3251,
        4096,
        phases(50, 23, 78, 12, 167),
        (*megatron(tensor=2, expert=8), "policy.sequence_packing.enabled=false"),
        "engines of 4 GPUs and no packing, as in their recipe; theirs pads each sequence to the longest",
        logprobs=4,
        utilization=0.7,
    ),
    Line(
        "v0.4, Qwen3-32B",
        QWEN_32B,
        32,
        4,
        3206 - PROMPT,
        4096,
        {"step": 393},
        megatron(tensor=4, pipeline=4),
        "no recomputation, as in their recipe",
    ),
    Line(
        "v0.6, Qwen3-30B-A3B",
        QWEN_30B,
        32,
        2,
        3203 - PROMPT,
        4096,
        {"step": 192},
        megatron(expert=8),
        "no recomputation, as in their recipe",
        logprobs=4,
    ),
    Line(
        "v0.6, Qwen3-235B-A22B",
        QWEN_235B,
        128,
        16,
        5698 - PROMPT,
        8192,
        {"step": 395},
        (*megatron(tensor=2, pipeline=8, expert=16, context=2, recompute=True), *stages(11, 11)),
        "recomputation, as in their recipe",
        prompts=16,
    ),
    Line(
        "v0.6, DeepSeek-V3, 256 GPUs",
        DEEPSEEK,
        256,
        32,
        701 - PROMPT,
        1536,
        {"step": 134},
        (*megatron(pipeline=16, expert=16, recompute=True), *stages(3, 2)),
        "recomputation, as in their recipe",
        prompts=32,
        answers=16,
    ),
    Line(
        "v0.6, DeepSeek-V3, 512 GPUs",
        DEEPSEEK,
        512,
        32,
        697 - PROMPT,
        1536,
        {"step": 111},
        (*megatron(pipeline=16, expert=16, recompute=True), *stages(3, 2)),
        "recomputation, as in their recipe",
        prompts=32,
        answers=16,
    ),
    Line(
        "v0.6, Qwen3-30B-A3B, 1 ahead",
        QWEN_30B,
        32,
        2,
        3201 - PROMPT,
        4096,
        {"step": 152},
        (*megatron(pipeline=2, expert=8), "policy.train_global_batch_size=2048"),
        "no recomputation, as in their recipe",
        ahead=1,
        generate=16,
        logprobs=4,
    ),
    Line(
        "v0.6, Qwen3-30B-A3B, 8 ahead",
        QWEN_30B,
        192,
        2,
        3206 - PROMPT,
        4096,
        {"step": 34.5},
        megatron(expert=8),
        "no recomputation, as in their recipe",
        ahead=8,
        generate=64,
        logprobs=4,
    ),
    Line(
        "v0.6, Qwen3-235B-A22B, 1 ahead",
        QWEN_235B,
        256,
        8,
        5721 - PROMPT,
        8192,
        {"step": 231},
        (*megatron(tensor=4, pipeline=8, expert=16, recompute=True), *stages(11, 11)),
        "recomputation, as in their recipe",
        prompts=16,
        ahead=1,
        generate=128,
    ),
    Line(
        "v0.6, DeepSeek-V3, 1 ahead",
        DEEPSEEK,
        512,
        32,
        710 - PROMPT,
        1536,
        {"step": 64.1},
        (*megatron(pipeline=16, expert=16, recompute=True), *stages(3, 2)),
        "recomputation, as in their recipe",
        prompts=32,
        answers=16,
        ahead=1,
        generate=256,
        logprobs=2,
    ),
    Line(
        "v0.6, GB200, DeepSeek-V3, 128 GPUs",
        DEEPSEEK,
        128,
        32,
        711 - PROMPT,
        1536,
        {"step": 108},
        (*megatron(pipeline=8, expert=16, recompute=True), *stages(7, 6)),
        "recomputation and stages, as in their recipe",
        FEW,
        prompts=32,
        answers=16,
        gpu="gb200",
        utilization=0.3,
    ),
    Line(
        "v0.6, GB200, DeepSeek-V3, 256 GPUs",
        DEEPSEEK,
        256,
        32,
        700 - PROMPT,
        1536,
        {"step": 98.7},
        (*megatron(pipeline=8, expert=16, recompute=True), *stages(7, 6)),
        "recomputation and stages, as in their recipe",
        FEW,
        prompts=32,
        answers=16,
        gpu="gb200",
        utilization=0.3,
    ),
    Line(
        "v0.6, GB200, DeepSeek-V3, 1 ahead",
        DEEPSEEK,
        256,
        16,
        708 - PROMPT,
        1536,
        {"step": 61.7},
        (*megatron(pipeline=8, expert=16, recompute=True), *stages(7, 6)),
        "recomputation and stages, as in their recipe",
        FEW,
        prompts=32,
        answers=16,
        ahead=1,
        generate=128,
        gpu="gb200",
        logprobs=2,
    ),
    Line(
        "v0.6, GB200, Qwen3-235B-A22B, 64 GPUs",
        QWEN_235B,
        64,
        8,
        5709 - PROMPT,
        8192,
        {"step": 286},
        (*megatron(tensor=2, pipeline=4, expert=16, context=2, recompute=True), *stages(23, 23)),
        "recomputation and stages, as in their recipe",
        prompts=16,
        answers=32,
        gpu="gb200",
        utilization=0.4,
    ),
    Line(
        "v0.6, GB200, Qwen3-235B-A22B, 128 GPUs",
        QWEN_235B,
        128,
        8,
        5693 - PROMPT,
        8192,
        {"step": 345},
        (*megatron(tensor=2, pipeline=4, expert=16, context=2, recompute=True), *stages(23, 23)),
        "recomputation and stages, as in their recipe",
        prompts=16,
        answers=32,
        gpu="gb200",
        utilization=0.6,
    ),
    Line(
        "v0.6, GB200, Qwen3-235B-A22B, 1 ahead",
        QWEN_235B,
        128,
        8,
        5705 - PROMPT,
        8192,
        {"step": 278},
        (*megatron(tensor=4, pipeline=4, expert=16, recompute=True), *stages(23, 23)),
        "recomputation and stages, as in their recipe",
        RACK,
        prompts=16,
        answers=32,
        ahead=1,
        generate=64,
        gpu="gb200",
    ),
    Line(
        "v0.6, GB200, Qwen3-30B-A3B",
        QWEN_30B,
        16,
        1,
        3199 - PROMPT,
        4096,
        {"step": 221},
        megatron(expert=16),
        "no recomputation, as in their recipe",
        RACK,
        prompts=64,
        answers=32,
        gpu="gb200",
        logprobs=2,
    ),
    Line(
        "v0.6, GB200, Qwen3-30B-A3B, 1 ahead",
        QWEN_30B,
        16,
        1,
        3197 - PROMPT,
        4096,
        {"step": 301},
        megatron(expert=8),
        "no recomputation, and experts over 8 GPUs, as in their recipe",
        RACK,
        prompts=64,
        answers=32,
        ahead=1,
        generate=8,
        gpu="gb200",
        logprobs=2,
    ),
]


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

"""Format the plan as a table for the terminal.

The functions for the parts of the table yield lines: a text to print as it is, or (label, text to wrap).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from launch.plan import generate_time, gpu_check, recomputation, roofline, shared_gpus, variants
from launch.plan.estimate import Plan
from launch.plan.memory_generate import engine_sizes
from launch.plan.memory_parts import GenerateMemory
from launch.plan.rank_division import engines, parallel_sizes
from launch.plan.step_time import is_priced
from launch.plan.variants import WIDTH, WORTH, Line, Mode
from launch.terminal.units import plural, seconds, size
from pipeline import config
from pipeline.config import ComponentConfig, Recipe, ahead, generates, hardware, ranks, runs_ahead, section, uses_megatron
from pipeline.config.cluster import LATENCY_US

LABEL = 14
FULL = 0.85  # gpu_memory_utilization above which the report proposes no larger value


def text(plan: Plan, compared: Sequence[Mode] = ()) -> str:
    """Return the table. compared: the modes of `variants.compare`."""
    parts = [
        _headline(plan),
        _models(plan),
        _memory(plan),
        _refit(plan) if generates(plan.recipe) else (),
        _times(plan),
        variants.mode_table(plan, compared) if compared else _waits(plan),
        _run(plan),
        _assumptions(plan),
        _verdict(plan),
    ]
    blocks = ["\n".join(map(_line_text, part)) for part in parts]
    return "\n\n".join(block for block in blocks if block)


def _line_text(line: Line) -> str:
    if isinstance(line, str):
        return line
    label, line_text = line
    first, further = f"{label:{LABEL}s}", " " * LABEL
    return textwrap.fill(line_text, WIDTH, break_on_hyphens=False, initial_indent=first, subsequent_indent=further)


def _headline(plan: Plan) -> Iterator[Line]:
    recipe = plan.recipe
    yield f"{recipe.name}: plan for {recipe.algorithm}. All figures are estimates"
    for name, component in config.components(recipe).items():
        sharing = ", the same GPUs in turn" if name == "generate" and config.colocated(recipe) else ""
        if name != "train" and recipe.cluster.share_nodes:
            sharing = ", on the same nodes"
        yield name, f"{_ranks(component)}{sharing}; {_cuts(plan, name)}"
    yield "backend", str(plan.choice)
    if plan.choice.recomputation:
        yield "recomputation", plan.choice.recomputation


def _ranks(component: ComponentConfig) -> str:
    on = f"{plural(ranks(component), 'rank')} on {plural(component.nodes, 'node')}"
    if not component.gpus_per_node:
        return f"{on}, no GPUs"
    return f"{on} with {component.gpus_per_node} {component.gpu} of {hardware.memory_gb(component):g} GB each"


def _cuts(plan: Plan, component: str) -> str:
    policy = plan.recipe.policy
    if component != "generate":
        return parallel_sizes(policy.megatron_cfg if uses_megatron(policy) else policy.dtensor_cfg)
    of_vllm = parallel_sizes(policy.generation.vllm_cfg) if policy.generation.backend == "vllm" else "no parallelism"
    return f"{plural(engines(policy, plan.recipe.cluster.generate), 'engine')}, {of_vllm}"


# ---- memory and refit ---------------------------------------------------------------------------------------------------


def _models(plan: Plan) -> Iterator[Line]:
    names = ("embedding", "attention", "MLP", "experts", "other", "all", "active")
    yield f"{'parameters':24s}" + "".join(f"{name:>13s}" for name in names)
    for name, shape in plan.shapes.items():
        numbers = (shape.embedding, shape.attention, shape.mlp, shape.routed, shape.other, shape.parameters, shape.active)
        yield f"{_model_name(name)[:23]:24s}" + "".join(f"{_billions(number):>13s}" for number in numbers)
    for name, policy in config.models(plan.recipe).items():
        shape = plan.shapes[name]
        layers = f"{plural(shape.layers, 'layer')}, hidden size {shape.hidden:,}, vocabulary {shape.vocabulary:,}"
        experts = f", {shape.experts} experts, {shape.experts_per_token} per token" if shape.experts else ""
        yield (
            _model_name(name)[: LABEL - 1],
            f"{policy.model_name}: {shape.family}, {layers}{experts}; {shape.parameters:,} parameters",
        )


def _model_name(section: str) -> str:
    """Return the displayed name of the model in a section of the recipe, for example "teacher math"."""
    return section.replace("on_policy_distillation.teachers.", "teacher ")


def _billions(count: float) -> str:
    return f"{count / 1e9:.2f}e9" if count >= 1e7 else f"{count:,.0f}"


def _memory(plan: Plan) -> Iterator[Line]:
    memories = {"train": plan.train, "generate": plan.generate, "reward": plan.reward}
    parts_of = {component: memory.parts for component, memory in memories.items() if memory}
    yield f"{'memory of the fullest rank':30s}" + "".join(f"{component:>14s}" for component in parts_of)
    for name in dict.fromkeys(name for parts in parts_of.values() for name in parts):
        yield f"  {name:28s}" + "".join(f"{size(parts[name]) if name in parts else '-':>14s}" for parts in parts_of.values())
    yield f"  {'all':28s}" + "".join(f"{size(sum(parts.values())):>14s}" for parts in parts_of.values())
    components = [getattr(plan.recipe.cluster, component) for component in parts_of]
    if all(component.gpus_per_node for component in components):
        yield f"  {'of a GPU with':28s}" + "".join(f"{hardware.memory_gb(component):>11g} GB" for component in components)
    yield "train", f"fullest in {plan.train.phase}; {size(plan.host)} of host memory a rank"
    if plan.turns:
        turns = (f"{t.name} {size(t.total)} (train {size(t.train)}, generate {size(t.generate)})" for t in plan.turns)
        yield "taking turns", f"a GPU holds in {', '.join(turns)}"
    if plan.generate:
        yield "generate", _cache(plan, plan.generate)


def _cache(plan: Plan, generate: GenerateMemory) -> str:
    """Return a text with the capacity of an engine's KV cache, and with a hint if the cache limits it and could be larger."""
    generation, tokens = plan.recipe.policy.generation, max(0.0, generate.tokens)
    most_longest, most_mean = max(0.0, generate.sequences), generate.holds(plan.lengths.sequence)
    at_once, _ = engine_sizes(plan.recipe, generate.shape)
    holds = (
        f"an engine's KV cache holds {tokens:,.0f} tokens: {most_longest:,.0f} sequences of"
        f" {generation.vllm_cfg.max_model_len:,} or {most_mean:,.0f} of {plan.lengths.sequence:,.0f};"
        f" at most {at_once:,} run at once (max_num_seqs)"
    )
    share = generation.vllm_cfg.gpu_memory_utilization
    if most_mean < at_once and share < FULL:
        holds += f"; it holds more with policy.generation.vllm_cfg.gpu_memory_utilization above {share:g}"
    return holds


def _refit(plan: Plan) -> Iterator[Line]:
    refit, took = plan.refit, seconds(plan.seconds["refit"]) if "refit" in plan.seconds else ""
    assert refit is not None, "it samples"
    moved = f"a train rank sends about {size(refit.sent)}, a generate rank receives about {size(refit.received)}"
    if plan.turns:
        way = "by CUDA IPC" if config.refits_by_ipc(plan.recipe) else "through host memory"
        yield "refit", f"{moved}, {way}{f', {took} including switching turns' if took else ''}"
        return
    took = f"; {plan.recipe.policy.generation.refit_transport}: about {took}" if took else ""
    yield "refit", f"{moved}{took}; bound by {refit.limit}"


# ---- times and costs ----------------------------------------------------------------------------------------------------


def _times(plan: Plan) -> Iterator[Line]:
    if not plan.phases:
        without = [f"cluster.{name}" for name, on in config.components(plan.recipe).items() if not on.gpus_per_node]
        reason = f"no GPUs in {' and '.join(without)}" if without else "an engine has no room for a KV cache"
        yield "times", f"unknown: {reason}"
        return
    yield f"{'a step':36s}{'FLOPs':>10s}{'time':>10s}   most of it"
    for clock, duration in plan.seconds.items():
        ratio = f"   measured / predicted {plan.ratios[clock]:.2f}" if clock in plan.ratios else ""
        yield f"{clock:36s}{'':10s}{seconds(duration):>10s}{ratio}"
        for phase in (phase for phase in plan.phases if phase.clock == clock):
            work = f"{phase.flops:.2e}" if phase.flops else ""
            yield f"  {phase.name:34s}{work:>10s}{seconds(phase.seconds):>10s}   {_most(phase.parts)}"
    at_once = f"   rollout and training overlap{_under_way(plan.recipe)}" if runs_ahead(plan.recipe) else ""
    yield f"{'all':36s}{sum(phase.flops for phase in plan.phases):10.2e}{seconds(plan.step):>10s}{at_once}"
    if not plan.ratios:
        yield "expect", _step_range(plan)


def _step_range(plan: Plan) -> str:
    """Return a text with the range in which a step's time may lie, judged by published steps on the plan's GPUs."""
    specs = {
        spec.name: spec.assumed
        for component in config.components(plan.recipe).values()
        if (spec := hardware.gpu(component.gpu))
    }
    unknown = [name for name, assumed in specs.items() if math.isnan(assumed.shortest_step + assumed.longest_step)]
    measure = "A plan calibrated by a run (plan_from=RUN_DIR) is more accurate"
    if unknown:
        return (
            f"no published steps on {' and '.join(unknown)} are known, so a step may take several times as long as planned."
            f" {measure}"
        )
    if _measured_lines(plan):
        return f"the accuracy for many GPUs is unknown, because one machine was measured. {measure}"
    low = min(assumed.shortest_step for assumed in specs.values())
    high = max(assumed.longest_step for assumed in specs.values())
    ends = f"{seconds(low * plan.step)} to {seconds(high * plan.step)} a step"
    quotients = f"Published steps of GRPO on {' and '.join(specs)} took {low:g} to {high:g} times as long as planned"
    return f"{ends}; all other times change by the same factors. {quotients}. {measure}"


def _under_way(recipe: Recipe) -> str:
    section = ahead(recipe)
    return f", {section.max_trajectory_age_steps + 1} rollouts in flight" if section.in_flight_weight_updates else ""


def _most(parts: Mapping[str, float]) -> str:
    """Return a text with the longest parts of a phase: at most three, each with more than 5% of the phase, longest first."""
    total = sum(parts.values())
    shares = sorted(((took / total, name) for name, took in parts.items() if total), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in shares[:3] if share > 0.05)


def _run(plan: Plan) -> Iterator[Line]:
    if plan.phases:
        yield "run", "; ".join(_whole(plan))
        yield "time limit", f"cluster.time_min {plan.recipe.cluster.time_min}: {_within_limit(plan)}"
        yield from _proposals(plan)
    if plan.checkpoints != 0:
        nbytes = plan.checkpoint_bytes
        per_checkpoint = "adapters and their optimizer's state" if nbytes is None else f"{size(nbytes)} each"
        about = "" if plan.checkpoints is None else f"about {plan.checkpoints}, "
        every = f"every {plan.recipe.checkpointing.save_period} steps (checkpointing.save_period)"
        yield "checkpoints", f"{per_checkpoint}, {about}{every}; the time to write them is unknown"


def _waits(plan: Plan) -> Iterator[Line]:
    """Yield the share of a step in which train ranks and engines are idle."""
    if plan.phases and plan.generate and not config.colocated(plan.recipe):
        train, engines = plan.step_time.train / plan.step, plan.step_time.generate / plan.step
        yield "waits", f"train ranks {train:.0%} of a step, engines {engines:.0%}; plan=true compares other modes"


def _proposals(plan: Plan) -> Iterator[Line]:
    """Yield a line for each single change of the recipe that would shorten a step, and one with the number of idle engines."""
    if variants.movable(plan.recipe):
        yield "split", variants.division(plan)
    variant, keys = recomputation.faster(plan.recipe, plan.shapes, plan.lengths)
    took = plan.step_elsewhere(variant) if keys and plan.fits else None
    if took is not None and 1 - took / plan.step > WORTH:
        yield "recomputing", f"{keys} would fit and take {seconds(took)} a step, {1 - took / plan.step:.0%} less"
    if plan.generate:
        count, (_, answers) = (
            engines(plan.recipe.policy, plan.recipe.cluster.generate),
            generate_time.rollout_size(plan.recipe),
        )
        if runs_ahead(plan.recipe) and ahead(plan.recipe).in_flight_weight_updates:
            answers *= ahead(plan.recipe).max_trajectory_age_steps + 1
        if count > answers:
            yield "idle", f"{count - answers} of {count} engines: {plural(answers, 'answer')} are sampled at once"


def _whole(plan: Plan) -> Iterator[str]:
    """Yield texts about the duration of the run or, if the run ends with its data, of a step and of a validation."""
    algorithm = plan.recipe.algorithm
    if plan.steps is None or plan.total is None or plan.gpu_hours is None:
        checks = f", {seconds(plan.validation)} a validation" if plan.validation else ""
        yield f"{seconds(plan.step)} a step{checks} on {plan.gpus} GPUs"
        epochs = plural(section(plan.recipe).max_num_epochs, "epoch")
        yield f"the run ends after {epochs} of its data; set {algorithm}.max_num_steps to see the total"
    else:
        checks = ""
        if plan.validations and plan.validation:
            checks = f" and {plural(plan.validations, 'validation')} of {seconds(plan.validation)}"
        yield f"{plan.steps:,} steps{checks} take {_hours(plan.total)}, {plan.gpu_hours:,.0f} GPU-hours on {plan.gpus} GPUs"
    if plan.validation is None and plan.validations != 0:
        yield f"a validation uses all of its data; set {algorithm}.max_val_samples to see how long it takes"


def _within_limit(plan: Plan) -> str:
    limit = 60 * plan.recipe.cluster.time_min
    if plan.total is not None and plan.submissions == 1:
        return f"enough; {_hours(limit - plan.total)} are left for what is not counted"
    holds = f"holds about {plural(int(limit / plan.step), 'step')}"
    if plan.total is None or not plan.submissions:
        return holds
    return f"{holds}; the run takes {plan.submissions} submissions, or one with cluster.time_min={int(plan.total / 60) + 1}"


def _hours(duration: float) -> str:
    return f"{duration / 3600:.1f} h" if duration >= 3600 else f"{duration / 60:.0f} min"


# ---- assumptions and verdict --------------------------------------------------------------------------------------------


def _assumptions(plan: Plan) -> Iterator[Line]:
    recipe = plan.recipe
    yield from (("" if number else "measured", text) for number, text in enumerate(_measured_lines(plan)))
    yield "assumed", f"{plan.lengths.source}; lengths are exponentially distributed up to {plan.lengths.limit:,.0f}"
    if is_priced(recipe):
        kinds = {(on.gpu, hardware.nvlink_gpus(on)): name for name, on in reversed(config.components(recipe).items())}
        for name in kinds.values():
            yield "", _hardware(plan, name)
        network = recipe.cluster.network
        yield "", f"network: {network.nic_gb_per_s:g} GB/s a NIC, {LATENCY_US:g} us a message; full bisection"
        if plan.turns:
            yield "", shared_gpus.assumed_rates(recipe)
        if recipe.policy.deterministic:
            yield "", roofline.assumed_slowdown(recipe)
        yield "", _why_unpriced(recipe)
    for text in (*plan.train.assumptions, *(plan.generate.assumptions if plan.generate else ())):
        yield "", text
    if plan.measured:
        source = plan.measured.where
        times = f"by {source}: the seconds of all clocks are multiplied by the run's measured / predicted"
        lengths = f"only lengths, by {source}; the run's times cannot be compared with predicted times"
        yield "calibrated", times if plan.ratios else lengths
    elif is_priced(recipe):
        yield "calibrated", "no: run_dir has no earlier run. Try plan_from=RUN_DIR"


def _measured_lines(plan: Plan) -> list[str]:
    """Return a text for each kind of GPU that plan.hardware measures."""
    descriptions = (gpu_check.describe(plan.recipe, on) for on in config.components(plan.recipe).values())
    return [text for text in dict.fromkeys(descriptions) if text]


def _hardware(plan: Plan, component: str) -> str:
    on = getattr(plan.recipe.cluster, component)
    gpu = gpu_check.gpu(plan.recipe, on)
    assumed, sparse = gpu.assumed, plan.shapes["policy"].experts > 0
    share = assumed.mixture_training if sparse else assumed.dense_training
    return (
        f"{gpu.name}: {gpu.bf16_tflops:g} TFLOP/s in BF16 ({gpu.fp8_tflops:g} in FP8, {gpu.fp32_tflops:g} in FP32), of which"
        f" matrix products reach {share:.0%}; HBM {gpu.hbm_gb_per_s:g} GB/s, of which kernels reach {assumed.bandwidth:.0%};"
        f" NVLink {gpu.nvlink_gb_per_s:g} GB/s among {hardware.nvlink_gpus(on)} GPUs; {assumed.engine_step_ms:.3g} ms overhead"
        " per engine step"
    )


def _why_unpriced(recipe: Recipe) -> str:
    uncounted = ["the run's start", "checkpoints", "packing on the CPU"]
    if not uses_megatron(recipe.policy):
        uncounted.append("savings by policy.dtensor_cfg.compile, use_liger_kernel and flash_attention")
    if generates(recipe):
        uncounted.append("environments on the CPU")
        if getattr(section(recipe), "use_dynamic_sampling", False):
            groups, batches = "groups that dynamic sampling drops", "batches of dynamic sampling after the first"
            uncounted.append(groups if runs_ahead(recipe) else batches)
    return f"not counted: {', '.join(uncounted)}"


def _verdict(plan: Plan) -> Iterator[Line]:
    if not config.has_gpus(plan.recipe):
        yield "verdict", "no GPUs: host memory is used, and its size is not known"
        return
    yield "verdict", "fits, by these estimates" if plan.fits else "does not fit"
    for text in (*plan.problems(), *plan.warnings()):
        yield "", str(text)
    for number, text in enumerate(plan.advice()):
        yield "" if number else "would help", text

"""Format the plan as a table for the terminal.

The functions for the parts of the table yield lines: a text to print as it is, or (label, text to wrap).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from launch.plan import gpu_check, roofline, shared_gpus, variants
from launch.plan.estimate import Plan
from launch.plan.memory_generate import engine_sizes
from launch.plan.memory_parts import GenerateMemory
from launch.plan.rank_division import engines, parallel_sizes
from launch.plan.step_time import is_priced
from launch.plan.variants import Mode
from launch.terminal.units import plural, seconds, size
from pipeline import config
from pipeline.config import ComponentConfig, Recipe, ahead, generates, hardware, runs_ahead, section, uses_megatron
from pipeline.config.cluster import LATENCY_US

LABEL, WIDTH = 14, 128
MARGIN, START_MIN = 0.1, 15  # share of a run's time and minutes, by which a proposed time limit exceeds the plan; assumed
Line = str | tuple[str, str]
"""A line to print as it is, or (label, text to wrap)."""
COLUMNS = {"nodes": 12, "GPUs": 6, "a step": 10, "GPU-s a step": 14, "train waits": 14, "engines wait": 14}
"""Column of the modes' table -> its width."""


def text(plan: Plan, compared: Sequence[Mode] = ()) -> str:
    """Return the table. compared: the modes of `variants.compare`."""
    parts = [
        _headline(plan),
        _models(plan),
        _memory(plan),
        _refit(plan) if generates(plan.recipe) else (),
        _times(plan),
        _modes(compared) if compared else _waits(plan),
        _run(plan),
        _assumptions(plan),
        _verdict(plan),
    ]
    return joined(parts)


def joined(parts: Sequence[Iterable[Line]]) -> str:
    """Return the lines of all parts as one text, with an empty line between parts."""
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
        sizes = "" if name == "environment" else f"{sharing}; {_cuts(plan, name)}"
        yield name, f"{ranks_text(component)}{sizes}"
    yield "backend", str(plan.choice)
    if plan.choice.recomputation:
        yield "recomputation", plan.choice.recomputation


def ranks_text(component: ComponentConfig) -> str:
    """Return a text with a component's numbers of ranks, nodes and GPUs."""
    on = f"{plural(config.ranks(component), 'rank')} on {plural(component.nodes, 'node')}"
    if not component.gpus_per_node:
        return f"{on}, no GPUs"
    return f"{on} with {component.gpus_per_node} {component.gpu} of {hardware.memory_gb(component):g} GB each"


def _cuts(plan: Plan, component: str) -> str:
    policy = plan.recipe.policy
    if component == "generate":
        return engines_text(plan.recipe)
    return parallel_sizes(policy.megatron_cfg if uses_megatron(policy) else policy.dtensor_cfg)


def engines_text(recipe: Recipe) -> str:
    """Return a text with the number of engines and their parallel sizes."""
    generation = recipe.policy.generation
    of_vllm = parallel_sizes(generation.vllm_cfg) if generation.backend == "vllm" else "no parallelism"
    return f"{plural(engines(recipe.policy, recipe.cluster.generate), 'engine')}, {of_vllm}"


# ---- memory and refit ---------------------------------------------------------------------------------------------------


def _models(plan: Plan) -> Iterator[Line]:
    for name, policy in (config.models(plan.recipe) | config.served_models(plan.recipe)).items():
        shape, label = plan.shapes[name], name.replace("on_policy_distillation.teachers.", "teacher ")
        layers = f"{plural(shape.layers, 'layer')}, hidden size {shape.hidden:,}, vocabulary {shape.vocabulary:,}"
        experts = f", {shape.experts} experts, {shape.experts_per_token} per token" if shape.experts else ""
        active = f", {shape.active / 1e9:.2f}e9 active" if shape.experts else ""
        text = f"{policy.model_name}: {shape.family}, {layers}{experts}; {shape.parameters:,} parameters{active}"
        yield label[: LABEL - 1], text


def _memory(plan: Plan) -> Iterator[Line]:
    memories = {"train": plan.train, "generate": plan.generate, "reward": plan.reward, "judge": plan.judge}
    parts_of = {component: memory.parts for component, memory in memories.items() if memory}
    yield from memory_rows(plan.recipe, parts_of)
    yield "train", f"fullest in {plan.train.phase}; {size(plan.host)} of host memory a rank"
    if plan.turns:
        turns = (f"{t.name} {size(t.total)} (train {size(t.train)}, generate {size(t.generate)})" for t in plan.turns)
        yield "taking turns", f"a GPU holds in {', '.join(turns)}"
    if plan.generate:
        yield "generate", _cache(plan, plan.generate)
    if plan.judge:
        tokens, longest = max(0.0, plan.judge.tokens), plan.recipe.judge.vllm_cfg.max_model_len
        held = (
            f"an engine's KV cache holds {tokens:,.0f} tokens: {max(0.0, plan.judge.sequences):,.0f} sequences of {longest:,}"
        )
        yield "judge", f"{held}. Durations do not count its replies"


def memory_rows(recipe: Recipe, parts_of: Mapping[str, Mapping[str, float]]) -> Iterator[Line]:
    """Yield the lines of a table of memory. parts_of: component -> part -> bytes of its fullest rank."""
    yield f"{'memory of the fullest rank':30s}" + "".join(f"{component:>14s}" for component in parts_of)
    for name in dict.fromkeys(name for parts in parts_of.values() for name in parts):
        yield f"  {name:28s}" + "".join(f"{size(parts[name]) if name in parts else '-':>14s}" for parts in parts_of.values())
    yield f"  {'all':28s}" + "".join(f"{size(sum(parts.values())):>14s}" for parts in parts_of.values())
    components = [getattr(recipe.cluster, component) for component in parts_of]
    if all(component.gpus_per_node for component in components):
        yield f"  {'of a GPU with':28s}" + "".join(f"{hardware.memory_gb(component):>11g} GB" for component in components)


def _cache(plan: Plan, generate: GenerateMemory) -> str:
    """Return a text with the capacity of an engine's KV cache."""
    at_once, _ = engine_sizes(plan.recipe, generate.shape)
    return (
        f"an engine's KV cache holds {max(0.0, generate.tokens):,.0f} tokens: {max(0.0, generate.sequences):,.0f} sequences of"
        f" {plan.recipe.policy.generation.vllm_cfg.max_model_len:,} or {generate.holds(plan.lengths.sequence):,.0f} of"
        f" {plan.lengths.sequence:,.0f}; at most {at_once:,} run at once (max_num_seqs)"
    )


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
        without = [f"cluster.{name}" for name, on in config.model_components(plan.recipe).items() if not on.gpus_per_node]
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
    specs, measure = _gpus(plan), "A plan calibrated by a run (plan_from=RUN_DIR) is more accurate"
    if unknown := [name for name, assumed in specs.items() if math.isnan(assumed.shortest_step + assumed.longest_step)]:
        return (
            f"no published steps on {' and '.join(unknown)} are known, so a step may take several times as long as planned."
            f" {measure}"
        )
    if _measured_lines(plan):
        return f"the accuracy for many GPUs is unknown, because one machine was measured. {measure}"
    low = min(assumed.shortest_step for assumed in specs.values())
    high = max(assumed.longest_step for assumed in specs.values())
    ends = f"{seconds(low * plan.step)} to {seconds(high * plan.step)} a step"
    sources = dict.fromkeys(assumed.steps_on or name for name, assumed in specs.items())
    without = [name for name in specs if name not in sources]
    quotients = f"Published steps of GRPO on {' and '.join(sources)} took {low:g} to {high:g} times as long as planned"
    quotients += f"; on {' and '.join(without)} none are known" if without else ""
    return f"{ends}; all other times change by the same factors. {quotients}. {measure}"


def _gpus(plan: Plan) -> dict[str, hardware.Assumed]:
    """Return the name of each kind of GPU of the plan, with its assumed values."""
    specs = (hardware.gpu(component.gpu) for component in config.model_components(plan.recipe).values())
    return {spec.name: spec.assumed for spec in specs}


def _slowest(plan: Plan) -> str:
    """Return a text with the factor of the slowest published step; "" if the plan is calibrated or knows no such step."""
    longest = [assumed.longest_step for assumed in _gpus(plan).values()]
    if plan.ratios or _measured_lines(plan) or any(map(math.isnan, longest)):
        return ""
    return f". Published steps took up to {max(longest):g} times as long as planned"


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


# ---- modes --------------------------------------------------------------------------------------------------------------


def _modes(compared: Sequence[Mode]) -> Iterator[Line]:
    """Yield the lines of a table of the modes, then a line with the recommended mode."""
    yield f"{'the same nodes':26s}" + "".join(f"{name:>{width}s}" for name, width in COLUMNS.items())
    for mode in compared:
        name = mode.name if mode.changes or mode.estimate is None else f"{mode.name}, as it is"
        if mode.why_not:
            why = f"not possible: {mode.why_not}"
            yield textwrap.fill(why, WIDTH, initial_indent=f"  {name:24s}", subsequent_indent=" " * 26)
        else:
            yield f"  {name:24s}" + "".join(
                f"{cell:>{width}}" for cell, width in zip(_cells(mode), COLUMNS.values(), strict=True)
            )
    yield "choice", variants.choice(compared)


def _cells(mode: Mode) -> list[str]:
    plan, cluster = mode.plan, mode.plan.recipe.cluster
    waits, key = ["-", "-"], "gpus_per_node" if cluster.share_nodes else "nodes"
    parts = [cluster.train]
    if not config.colocated(plan.recipe):
        parts += [cluster.generate, *([cluster.reward] if config.serves_rewards(plan.recipe) else [])]
        waits = [f"{idle / plan.step:.0%}" for idle in (plan.step_time.train, plan.step_time.generate)]
    parts += [cluster.judge] * config.serves_judge(plan.recipe)
    nodes = f"{' + '.join(str(getattr(part, key)) for part in parts)}{' GPUs' if cluster.share_nodes else ''}"
    return [nodes, str(plan.gpus), seconds(plan.step), f"{mode.cost:,.0f}", *waits]


# ---- the run --------------------------------------------------------------------------------------------------------------


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
    limit, holds, total = 60 * plan.recipe.cluster.time_min, plan.steps_in_limit, plan.total
    text = (
        f"holds about {plural(holds, 'step')}{' with their validations' * bool(plan.validation)}" if holds else "holds no step"
    )
    if total is not None:
        minutes = 10 * math.ceil((total * (1 + MARGIN) / 60 + START_MIN) / 10)
        roomy = f"cluster.time_min={minutes}, with {MARGIN:.0%} and {START_MIN} minutes for what is not counted"
        if plan.submissions == 1:
            left = f"{_hours(limit - total)} are left for what is not counted"
            text = f"enough; {left}" if 60 * minutes <= limit else f"barely enough; {left}. Try {roomy}"
        elif plan.submissions:
            text += f"; the run takes {plan.submissions} submissions, or one with {roomy}"
        else:
            text += f". Try {roomy}"
    return text + _slowest(plan)


def _hours(duration: float) -> str:
    return f"{duration / 3600:.1f} h" if duration >= 3600 else f"{duration / 60:.0f} min"


# ---- assumptions and verdict --------------------------------------------------------------------------------------------


def _assumptions(plan: Plan) -> Iterator[Line]:
    recipe = plan.recipe
    yield from (("" if number else "measured", text) for number, text in enumerate(_measured_lines(plan)))
    yield "assumed", f"{plan.lengths.source}; lengths are exponentially distributed up to {plan.lengths.limit:,.0f}"
    if is_priced(recipe):
        kinds = {(on.gpu, hardware.nvlink_gpus(on)): name for name, on in reversed(config.model_components(recipe).items())}
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
        if plan.differences:
            yield (
                "",
                f"that run has another {', another '.join(plan.differences)}; costs that the plan leaves out may differ too",
            )
    elif is_priced(recipe):
        yield "calibrated", "no: run_dir has no earlier run. Try plan_from=RUN_DIR"


def _measured_lines(plan: Plan) -> list[str]:
    """Return a text for each kind of GPU that plan.hardware measures."""
    descriptions = (gpu_check.describe(plan.recipe, on) for on in config.model_components(plan.recipe).values())
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

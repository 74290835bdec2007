"""A plan as a table to read in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from launch.plan import generate_time, modes, sharing, split
from launch.plan.advice import recomputes_less
from launch.plan.cut import cut_sizes, engines
from launch.plan.estimate import Plan, step_elsewhere
from launch.plan.modes import Mode
from launch.plan.step import priced
from launch.units import plural as _plural
from launch.units import seconds as _seconds
from launch.units import size as _size
from pipeline import config
from pipeline.config import ComponentConfig, Recipe, generates, hardware, ranks, runs_ahead, section, uses_megatron

WIDTH = 128
LABEL = 14
MODE_WIDTHS = (12, 6, 10, 14, 14, 14)
FULL = 0.85  # of a GPU that an engine has for itself: beyond that little is left to gain


def text(plan: Plan, compared: Sequence[Mode] = ()) -> str:
    """Return the table. compared: what else the recipe could be, as `modes.compare` finds it."""
    parts = [_headline(plan), _models(plan), _memory(plan)]
    if generates(plan.recipe):
        parts.append(_refit(plan))
    parts += [
        _times(plan),
        _modes(plan, compared) if compared else _waits(plan),
        _run(plan),
        _assumptions(plan),
        _verdict(plan),
    ]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part)


def _line(label: str, what: str) -> str:
    return textwrap.fill(what, WIDTH, initial_indent=f"{label:{LABEL}s}", subsequent_indent=" " * LABEL, break_on_hyphens=False)


def _headline(plan: Plan) -> Iterator[str]:
    recipe = plan.recipe
    yield f"{recipe.name}: the plan of {recipe.algorithm}. All figures are estimates"
    for name, component in config.components(recipe).items():
        same = ", the same GPUs in turn" if name == "generate" and config.colocated(recipe) else ""
        if name != "train" and recipe.cluster.share_nodes:
            same = ", of the same nodes"
        yield _line(name, f"{_ranks(component)}{same}; {_cuts(plan, name)}")
    yield _line("backend", str(plan.choice))


def _ranks(component: ComponentConfig) -> str:
    count = ranks(component)
    nodes = _plural(component.nodes, "node")
    if not component.gpus_per_node:
        return f"{_plural(count, 'rank')} on {nodes}, no GPUs"
    memory = hardware.memory_gb(component)
    return f"{_plural(count, 'rank')} on {nodes} with {component.gpus_per_node} {component.gpu} of {memory:g} GB each"


def _cuts(plan: Plan, component: str) -> str:
    policy = plan.recipe.policy
    if component == "generate":
        held = policy.generation.vllm_cfg if policy.generation.backend == "vllm" else None
        made = engines(policy, plan.recipe.cluster.generate)
        return f"{_plural(made, 'engine')}, {cut_sizes(held) if held else 'no parallelism'}"
    return cut_sizes(policy.megatron_cfg if uses_megatron(policy) else policy.dtensor_cfg)


# ---- what is held and moved -----------------------------------------------------------------------------------------------


def _models(plan: Plan) -> Iterator[str]:
    names = ("embedding", "attention", "MLP", "experts", "other", "all", "active")
    yield f"{'parameters':24s}" + "".join(f"{name:>13s}" for name in names)
    for name, shape in plan.shapes.items():
        numbers = (shape.embedding, shape.attention, shape.mlp, shape.routed, shape.other, shape.parameters, shape.active)
        yield f"{name:24s}" + "".join(f"{_billions(number):>13s}" for number in numbers)
    for name, policy in config.models(plan.recipe).items():
        shape = plan.shapes[name]
        layers = f"{_plural(shape.layers, 'layer')}, hidden size {shape.hidden:,}, vocabulary {shape.vocabulary:,}"
        experts = f", {shape.experts} experts of which {shape.experts_per_token}" if shape.experts else ""
        yield _line(name[: LABEL - 1], f"{policy.model_name}: {shape.family}, {layers}{experts}; {shape.parameters:,} exactly")


def _billions(count: float) -> str:
    return f"{count / 1e9:.2f}e9" if count >= 1e7 else f"{count:,.0f}"


def _memory(plan: Plan) -> Iterator[str]:
    recipe = plan.recipe
    held = {"train": plan.train.parts}
    if plan.generate:
        held["generate"] = plan.generate.parts
    if plan.reward:
        held["reward"] = plan.reward.parts
    names = list(dict.fromkeys(name for parts in held.values() for name in parts))
    yield f"{'memory of the fullest rank':30s}" + "".join(f"{component:>14s}" for component in held)
    for name in names:
        yield f"  {name:28s}" + "".join(f"{_size(parts[name]) if name in parts else '-':>14s}" for parts in held.values())
    yield f"  {'all':28s}" + "".join(f"{_size(sum(parts.values())):>14s}" for parts in held.values())
    sizes = [getattr(recipe.cluster, component) for component in held]
    if all(component.gpus_per_node for component in sizes):
        yield f"  {'of a GPU with':28s}" + "".join(f"{hardware.memory_gb(component):>11g} GB" for component in sizes)
    yield _line("train", f"fullest in {plan.train.phase}; {_size(plan.host)} of host memory a rank")
    if plan.turns:
        told = ", ".join(
            f"{turn.name} {_size(turn.total)} (train {_size(turn.train)}, generate {_size(turn.generate)})"
            for turn in plan.turns
        )
        yield _line("taking turns", f"a GPU holds in {told}")
    if plan.generate:
        tokens, limit = max(0.0, plan.generate.tokens), recipe.policy.generation.vllm_cfg.max_model_len
        whole, mean = max(0.0, plan.generate.sequences), tokens / plan.lengths.sequence
        holds = f"an engine's KV cache holds {tokens:,.0f} tokens: {whole:,.0f} sequences of {limit:,}"
        holds += f" or {mean:,.0f} of {plan.lengths.sequence:,.0f}"
        vllm, most = recipe.policy.generation.vllm_cfg, recipe.policy.generation.max_num_seqs
        holds += f"; {most} may run (max_num_seqs)"
        if mean < most and vllm.gpu_memory_utilization < FULL:
            holds += (
                f"; more would with policy.generation.vllm_cfg.gpu_memory_utilization above {vllm.gpu_memory_utilization:g}"
            )
        yield _line("generate", holds)


def _refit(plan: Plan) -> Iterator[str]:
    refit = plan.refit
    if refit is None:
        yield _line("refit", f"not known: {plan.refit_unknown}")
        return
    sent, received = _size(float(refit.sent.max())), _size(float(refit.received.max()))
    moved = f"{sent} leave the busiest train rank, {received} reach a generate rank"
    if plan.turns:
        took = f", {_seconds(plan.seconds['refit'])} with taking turns" if "refit" in plan.seconds else ""
        way = "by CUDA IPC" if config.refits_by_ipc(plan.recipe) else "through host memory"
        yield _line("refit", f"{moved}, {way}{took}")
        return
    floor, limit = refit.floor
    transport = plan.recipe.policy.generation.refit_transport
    taken = f"; {transport}: {_seconds(plan.seconds['refit'])}" if "refit" in plan.seconds else ""
    yield _line("refit", f"{moved}{taken}; no transfer could take less than {_seconds(floor)} ({limit})")


# ---- what it takes --------------------------------------------------------------------------------------------------------


def _times(plan: Plan) -> Iterator[str]:
    if not plan.phases:
        without = [
            f"cluster.{name}" for name, component in config.components(plan.recipe).items() if not component.gpus_per_node
        ]
        why = f"no GPUs in {' and '.join(without)}" if without else "an engine has no room for a KV cache"
        yield _line("times", f"not told: {why}")
        return
    yield f"{'a step':36s}{'FLOPs':>10s}{'time':>10s}   most of it"
    for clock, seconds in plan.seconds.items():
        ratio = f"   measured / predicted {plan.ratios[clock]:.2f}" if clock in plan.ratios else ""
        yield f"{clock:36s}{'':10s}{_seconds(seconds):>10s}{ratio}"
        for phase in plan.phases:
            if phase.clock == clock:
                work = f"{phase.flops:.2e}" if phase.flops else ""
                yield f"  {phase.name:34s}{work:>10s}{_seconds(phase.seconds):>10s}   {_most(phase.parts)}"
    at_once = f"   rollout and training at once{_under_way(plan.recipe)}" if runs_ahead(plan.recipe) else ""
    yield f"{'all':36s}{sum(phase.flops for phase in plan.phases):10.2e}{_seconds(plan.step):>10s}{at_once}"


def _under_way(recipe: Recipe) -> str:
    ahead = recipe.grpo.async_grpo
    return f", {ahead.max_trajectory_age_steps + 1} rollouts under way" if ahead.in_flight_weight_updates else ""


def _most(parts: Mapping[str, float]) -> str:
    """The parts that are more than a twentieth of a phase, the longest first; three at most."""
    total = sum(parts.values())
    shares = sorted(((seconds / total, name) for name, seconds in parts.items() if total), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in shares[:3] if share > 0.05)


def _waits(plan: Plan) -> Iterator[str]:
    if plan.phases and plan.generate and not config.colocated(plan.recipe):
        train, engines = plan.pace.train / plan.step, plan.pace.generate / plan.step
        yield _line("waits", f"train ranks {train:.0%} of a step, engines {engines:.0%}; plan=true compares with other ways")


def _modes(plan: Plan, compared: Sequence[Mode]) -> Iterator[str]:
    cost = "GPU-hours" if plan.steps else "GPU-s a step"
    columns = zip(("nodes", "GPUs", "a step", cost, "train waits", "engines wait"), MODE_WIDTHS, strict=True)
    yield f"{'the same nodes':26s}" + "".join(f"{name:>{width}s}" for name, width in columns)
    for mode in compared:
        name = mode.name if mode.changes or mode.plan is None else f"{mode.name}, as it is"
        if mode.why_not:
            yield textwrap.fill(f"not so: {mode.why_not}", WIDTH, initial_indent=f"  {name:24s}", subsequent_indent=" " * 26)
        else:
            yield f"  {name:24s}{_mode(mode)}"
            if (spare := plan.gpus - mode.plan.gpus) > 0:
                yield f"  {'':24s}{_plural(spare, 'GPU')} of the recipe's {plan.gpus} would be left over"
    yield _line("choice", _choice(compared))


def _mode(mode: Mode) -> str:
    found, cluster = mode.plan, mode.plan.recipe.cluster
    own, waits = [*split.sizes(found.recipe)], [found.pace.train, found.pace.generate]
    if config.serves_rewards(found.recipe):
        own.append(getattr(cluster.reward, split.key_of(found.recipe)))
    nodes = f"{' + '.join(map(str, own))}{' GPUs' if cluster.share_nodes else ''}"
    cells = [found.gpus, _seconds(found.step), f"{mode.cost if found.gpu_hours is None else found.gpu_hours:,.0f}"]
    if config.colocated(found.recipe):
        cells = [cluster.train.nodes, *cells, "-", "-", f"   {mode.moving:.0%} for changing turns"]
    else:
        cells = [nodes, *cells, *(f"{seconds / found.step:.0%}" for seconds in waits), ""]
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, (*MODE_WIDTHS, 0), strict=True))


def _choice(compared: Sequence[Mode]) -> str:
    """Return which mode takes the fewest GPU-hours, compared with the others, and the keys that choose it."""
    best = modes.choose(compared)
    if best is None:
        return "none of them fits"
    told = []
    for mode in compared:
        if mode is not best and not mode.why_not:
            if best.cost <= mode.cost:
                told.append(f"{1 - best.cost / mode.cost:.0%} fewer GPU-hours than {_named(mode, best)}")
            else:
                but = ", but trains on older rollouts" if mode.name == "async" else ""
                told.append(f"{_named(mode, best)} takes {1 - mode.cost / best.cost:.0%} fewer{but}")
    keys = " ".join(f"{key}={'null' if value is None else str(value).lower()}" for key, value in best.changes.items())
    return "; ".join([f"{best.name}: {', '.join(told) or 'nothing else fits'}", *([keys] if keys else [])])


def _named(mode: Mode, best: Mode) -> str:
    """Return a mode's name, told apart from the best one's."""
    return "the recipe as it is" if mode.name == best.name and not mode.changes else mode.name


def _run(plan: Plan) -> Iterator[str]:
    if plan.phases:
        limit = plan.recipe.cluster.time_min
        yield _line("run", "; ".join(_whole(plan)))
        if plan.submissions == 1:
            told = f"enough; {_hours(60 * limit - plan.total)} are left for what is not counted"
        else:
            told = f"holds about {_plural(int(60 * limit / plan.step), 'step')}"
            if plan.submissions:
                needed = f"{plan.submissions} submissions, or cluster.time_min={int(plan.total / 60) + 1}"
                told += f"; the run takes {needed}"
        yield _line("time limit", f"cluster.time_min {limit}: {told}")
        yield from _split(plan)
        yield from _recomputation(plan)
        yield from _idle(plan)
    if plan.checkpoints != 0:
        size = (
            "adapters and their optimizer's state" if plan.checkpoint_bytes is None else f"{_size(plan.checkpoint_bytes)} each"
        )
        about = "" if plan.checkpoints is None else f"about {plan.checkpoints}, "
        every = f"every {plan.recipe.checkpointing.save_period} steps (checkpointing.save_period)"
        yield _line("checkpoints", f"{size}, {about}{every}; how long the file system takes is not known")


def _whole(plan: Plan) -> Iterator[str]:
    """What the run takes; of one that its data end, what a step and a validation take."""
    algorithm, own = plan.recipe.algorithm, section(plan.recipe)
    if plan.steps is None:
        checks = f", {_seconds(plan.validation)} a validation" if plan.validation else ""
        yield f"{_seconds(plan.step)} a step{checks} on {plan.gpus} GPUs"
        epochs = _plural(own.max_num_epochs, "epoch")
        yield f"it ends after {epochs} of its data, and {algorithm}.max_num_steps would tell the rest"
    else:
        checks = ""
        if plan.validations and plan.validation:
            checks = f" and {_plural(plan.validations, 'validation')} of {_seconds(plan.validation)}"
        yield f"{plan.steps:,} steps{checks} take {_hours(plan.total)}, {plan.gpu_hours:,.0f} GPU-hours on {plan.gpus} GPUs"
    if plan.validation is None and plan.validations != 0:
        yield f"a validation goes through all of its data, and {algorithm}.max_val_samples would tell how long that takes"


def _split(plan: Plan) -> Iterator[str]:
    if not split.movable(plan.recipe):
        return
    by = (
        f"as measured in {plan.measured.where}"
        if plan.ratios
        else "by these estimates alone; a few measured steps would tell better"
    )
    better = plan.split
    if better is None:
        yield _line("split", f"no other division {'makes a step clearly shorter' if plan.fits else 'fits either'}, {by}")
    else:
        gain = f"{better.gain:.0%} less" if plan.fits else "and fits"
        yield _line("split", f"{better} would take {_seconds(better.seconds)} a step, {gain}, {by}")


def _recomputation(plan: Plan) -> Iterator[str]:
    other = recomputes_less(plan.recipe) if plan.fits else None
    seconds = step_elsewhere(plan, other) if other else None
    if seconds is not None and 1 - seconds / plan.step > split.WORTH:
        gain = f"{_seconds(seconds)} a step, {1 - seconds / plan.step:.0%} less"
        yield _line("recomputing", f"policy.dtensor_cfg.recompute_granularity=selective would fit and take {gain}")


def _idle(plan: Plan) -> Iterator[str]:
    """Yield how many engines have nothing to sample."""
    if plan.generate is None:
        return
    made, answers = engines(plan.recipe.policy, plan.recipe.cluster.generate), generate_time.sampled(plan.recipe)[1]
    if runs_ahead(plan.recipe) and plan.recipe.grpo.async_grpo.in_flight_weight_updates:
        answers *= plan.recipe.grpo.async_grpo.max_trajectory_age_steps + 1
    if made > answers:
        yield _line("idle", f"{made - answers} of {made} engines: {_plural(answers, 'answer')} are sampled at once")


def _assumptions(plan: Plan) -> Iterator[str]:
    recipe = plan.recipe
    yield _line("assumed", f"{plan.lengths.source}; the longest {plan.lengths.limit:,.0f}, between them exponential")
    if priced(recipe):
        kinds = {(on.gpu, hardware.nvlink_gpus(on)): name for name, on in reversed(config.components(recipe).items())}
        for name in kinds.values():
            yield _line("", _hardware(plan, name))
        network = recipe.cluster.network
        yield _line("", f"network: {network.nic_gb_per_s:g} GB/s a NIC, {network.latency_us:g} us a message; full bisection")
        if plan.turns:
            yield _line("", sharing.assumed(recipe))
        yield _line("", _unpriced(recipe))
    for text in (*plan.train.assumptions, *(plan.generate.assumptions if plan.generate else ())):
        yield _line("", text)
    if plan.measured and plan.ratios:
        yield _line("calibrated", f"by {plan.measured.where}: a clock's seconds are multiplied by measured / predicted there")
    elif plan.measured:
        yield _line(
            "calibrated", f"lengths alone, by {plan.measured.where}; that run's times cannot be compared with predicted ones"
        )
    elif priced(recipe):
        yield _line("calibrated", "by nothing: run_dir has no earlier run; plan_from=RUN_DIR names another")


def _hardware(plan: Plan, component: str) -> str:
    on = getattr(plan.recipe.cluster, component)
    gpu = hardware.gpu(on.gpu)
    assumed, sparse = gpu.assumed, plan.shapes["policy"].experts > 0
    share = assumed.mixture_training if sparse else assumed.dense_training
    return (
        f"{gpu.name}: {gpu.bf16_tflops:g} TFLOP/s in BF16 ({gpu.fp8_tflops:g} in FP8, {gpu.fp32_tflops:g} in FP32), of which"
        f" matrix products reach {share:.0%}; HBM {gpu.hbm_gb_per_s:g} GB/s, of which {assumed.bandwidth:.0%}; NVLink"
        f" {gpu.nvlink_gb_per_s:g} GB/s among {hardware.nvlink_gpus(on)}; {assumed.engine_step_ms:g} ms an engine's step beside"
        " that"
    )


def _unpriced(recipe: Recipe) -> str:
    left = ["the run's start", "checkpoints", "packing on the CPU"]
    if not uses_megatron(recipe.policy):
        left.append("what policy.dtensor_cfg.compile, use_liger_kernel and flash_attention save")
    if generates(recipe):
        left.append("environments on the CPU")
    if generates(recipe) and getattr(section(recipe), "use_dynamic_sampling", False):
        later = (
            "groups that dynamic sampling passes over" if runs_ahead(recipe) else "batches of dynamic sampling after the first"
        )
        left.append(later)
    return f"not in these times: {', '.join(left)}"


def _verdict(plan: Plan) -> Iterator[str]:
    if not any(component.gpus_per_node for component in config.components(plan.recipe).values()):
        yield _line("verdict", "no GPUs: memory is the host's, which is not described")
        return
    yield _line("verdict", "fits, by these estimates" if plan.fits else "does not fit")
    for text in (*plan.problems(), *plan.warnings()):
        yield _line("", str(text))
    for number, text in enumerate(plan.advice()):
        yield _line("" if number else "would help", text)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"

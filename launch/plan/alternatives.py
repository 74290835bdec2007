"""Write the plan's lines about alternatives: modes, divisions of the nodes, recomputation, idle engines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from launch.plan import generate_time, modes, recomputation, split
from launch.plan.estimate import Plan, step_elsewhere
from launch.plan.modes import Mode
from launch.plan.rank_division import engines
from launch.terminal.units import plural, seconds
from pipeline import config
from pipeline.config import ahead, runs_ahead

Line = str | tuple[str, str]
"""A line to print as it is, or (label, text to wrap)."""
WIDTH = 128  # of the report
WIDTHS = (12, 6, 10, 14, 14, 14)


def waits(plan: Plan) -> Iterator[Line]:
    """Yield the share of a step in which train ranks and engines are idle."""
    if plan.phases and plan.generate and not config.colocated(plan.recipe):
        train, engines = plan.step_time.train / plan.step, plan.step_time.generate / plan.step
        yield "waits", f"train ranks {train:.0%} of a step, engines {engines:.0%}; plan=true compares other modes"


def mode_table(plan: Plan, compared: Sequence[Mode]) -> Iterator[Line]:
    """Yield the lines of a table of the modes, then a line with the recommended mode."""
    cost = "GPU-hours" if plan.steps else "GPU-s a step"
    columns = zip(("nodes", "GPUs", "a step", cost, "train waits", "engines wait"), WIDTHS, strict=True)
    yield f"{'the same nodes':26s}" + "".join(f"{name:>{width}s}" for name, width in columns)
    for mode in compared:
        name = mode.name if mode.changes or mode.estimate is None else f"{mode.name}, as it is"
        if mode.why_not:
            yield textwrap.fill(
                f"not possible: {mode.why_not}", WIDTH, initial_indent=f"  {name:24s}", subsequent_indent=" " * 26
            )
        else:
            yield f"  {name:24s}{_row(mode)}"
            if (spare := plan.gpus - mode.plan.gpus) > 0:
                yield f"  {'':24s}{plural(spare, 'GPU')} of the recipe's {plan.gpus} would stay unused"
    yield "choice", choice(compared)


def _row(mode: Mode) -> str:
    plan, cluster = mode.plan, mode.plan.recipe.cluster
    cells = [plan.gpus, seconds(plan.step), f"{mode.cost if plan.gpu_hours is None else plan.gpu_hours:,.0f}"]
    if config.colocated(plan.recipe):
        cells = [cluster.train.nodes, *cells, "-", "-", f"   {mode.moving:.0%} for switching turns"]
    else:
        sizes = [*split.sizes(plan.recipe)]
        if config.serves_rewards(plan.recipe):
            sizes.append(getattr(cluster.reward, split.key_of(plan.recipe)))
        nodes = f"{' + '.join(map(str, sizes))}{' GPUs' if cluster.share_nodes else ''}"
        cells = [nodes, *cells, *(f"{idle / plan.step:.0%}" for idle in (plan.step_time.train, plan.step_time.generate)), ""]
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, (*WIDTHS, 0), strict=True))


def choice(compared: Sequence[Mode]) -> str:
    """Return a text: the recommended mode, its GPU-hours compared with the other modes', and the keys that select it."""
    best = modes.choose(compared)
    if best is None:
        return "no mode fits"
    against = []
    for mode in compared:
        if mode is best or mode.why_not:
            continue
        name = "the recipe as it is" if mode.name == best.name and not mode.changes else mode.name
        if best.cost <= mode.cost:
            against.append(f"{1 - best.cost / mode.cost:.0%} fewer GPU-hours than {name}")
        else:
            but = ", but trains on older rollouts" if mode.name == "async" else ""
            against.append(f"{name} takes {1 - mode.cost / best.cost:.0%} fewer GPU-hours{but}")
    keys = " ".join(f"{key}={'null' if value is None else str(value).lower()}" for key, value in best.changes.items())
    return "; ".join([f"{best.name}: {', '.join(against) or 'no other mode fits'}", *([keys] if keys else [])])


def proposals(plan: Plan) -> Iterator[Line]:
    """Yield a line for each single change of the recipe that would shorten a step, and one with the number of idle engines."""
    if split.movable(plan.recipe):
        yield "split", _division(plan)
    variant, keys = recomputation.faster(plan.recipe, plan.shapes, plan.lengths)
    took = step_elsewhere(plan, variant) if keys and plan.fits else None
    if took is not None and 1 - took / plan.step > split.WORTH:
        yield "recomputing", f"{keys} would fit and take {seconds(took)} a step, {1 - took / plan.step:.0%} less"
    if plan.generate:
        engine_count, answers = (
            engines(plan.recipe.policy, plan.recipe.cluster.generate),
            generate_time.rollout_size(plan.recipe)[1],
        )
        if runs_ahead(plan.recipe) and ahead(plan.recipe).in_flight_weight_updates:
            answers *= ahead(plan.recipe).max_trajectory_age_steps + 1
        if engine_count > answers:
            yield "idle", f"{engine_count - answers} of {engine_count} engines: {plural(answers, 'answer')} are sampled at once"


def _division(plan: Plan) -> str:
    estimated = "by these estimates only; measure a few steps to be sure"
    by = f"as measured in {plan.measured.where}" if plan.measured and plan.ratios else estimated
    if plan.split is None:
        return f"no other division {'is clearly faster' if plan.fits else 'fits either'}, {by}"
    gain = f"{plan.split.gain:.0%} less" if plan.fits else "and fits"
    return f"{plan.split} would take {seconds(plan.split.seconds)} a step, {gain}, {by}"

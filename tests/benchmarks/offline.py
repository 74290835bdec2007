"""Compare SFT and DPO by ours and by TRL 1.16: losses step by step, and CPU seconds. See lessons.py for what is equal.

`compare` prints the tables and draws every curve into one picture.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from pipeline.config import RECIPES
from pipeline.data import scratchpad
from tests.benchmarks import lessons, trl_environment
from tests.benchmarks.contender import Contender
from tests.benchmarks.lessons import LAST, SEEDS, SFT, Lesson
from tests.benchmarks.train_step import TRAIN_BACKENDS

TRL = "TRL 1.16"
NAMES = (TRL, *(f"ours, {title}" for title in TRAIN_BACKENDS.values()))
Curves = dict[str, list[list[float]]]  # by contender, for each seed a value at each step


def compare(names: Sequence[str], folder: Path, trl: Path) -> Path:
    """Draw the picture. names: of lessons; those after SFT start from ours. trl: the folder of TRL's environment."""
    found = {}
    for name, lesson in lessons.LESSONS.items():
        if name in names or lesson is SFT:  # the contender whose models the other starts from
            found[name] = _learn(lesson, folder, trl)
    for name in names:
        _print(lessons.LESSONS[name], *found[name])
    return _draw({name: found[name][0] for name in names}, folder / "-".join(["losses", *names]))


def _learn(lesson: Lesson, folder: Path, trl: Path) -> tuple[Curves, Curves]:
    """Print losses and CPU seconds."""
    losses: Curves = {name: [] for name in NAMES}
    seconds: Curves = {name: [] for name in NAMES}
    for seed in SEEDS:
        _prepare(lesson, folder, seed)
        arguments = [lesson.name, str(folder), str(seed)]
        commands = {TRL: [trl_environment.python(trl), "-m", "tests.benchmarks.trl_lesson", *arguments]}
        for backend, title in TRAIN_BACKENDS.items():
            commands[f"ours, {title}"] = [sys.executable, "-m", "tests.benchmarks.our_lesson", *arguments, backend]
        logs = [folder / f"{lesson.name}-{seed}-{i}.log" for i in range(len(commands))]
        contenders = [Contender(name, command, log) for (name, command), log in zip(commands.items(), logs, strict=True)]
        answers = [[contender.step() for contender in contenders] for _ in range(lesson.steps)]
        for i, contender in enumerate(contenders):
            contender.close()
            losses[contender.name].append([of_step[i]["loss"] for of_step in answers])
            seconds[contender.name].append([of_step[i]["times"]["step"][0] for of_step in answers])
    return losses, seconds


def _prepare(lesson: Lesson, folder: Path, seed: int) -> None:
    """Write the records and the initial model."""
    folder.mkdir(parents=True, exist_ok=True)
    make = scratchpad.addition if lesson is SFT else scratchpad.preferences
    records = make("train", lesson.steps * lesson.batch, seed, lessons.DIGITS, mistakes=0.3)
    lessons.records_file(folder, lesson, seed).write_text("".join(json.dumps(record) + "\n" for record in records))
    if lesson is not SFT:
        learned = folder / f"{SFT.name}-{seed}-fsdp"
        lessons.model_folder(folder, lesson, seed).unlink(missing_ok=True)
        lessons.model_folder(folder, lesson, seed).symlink_to(learned.name)
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    start = lessons.model_folder(folder, lesson, seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(RECIPES / "tiny"), dtype=torch.float32).save_pretrained(start)
    AutoTokenizer.from_pretrained(RECIPES / "tiny").save_pretrained(start)


def _print(lesson: Lesson, losses: Curves, seconds: Curves) -> None:
    examples = "examples" if lesson is SFT else "pairs"
    print(
        f"\n{lesson.name}: recipes/tiny, float32, one thread, {lesson.steps} steps of {lesson.batch} {examples}; seeds"
        f" {', '.join(map(str, SEEDS))}, of weights and data. Final: the mean loss of the last {LAST} steps. Differences: the"
        f" largest from {TRL}'s of the same seed. CPU seconds: of a step, taken in turns."
    )
    titles = [f"{'seed ' + str(seed):>9s}" for seed in SEEDS]
    print(f"{'':22s}{'first loss':>11s}   final:{''.join(titles)}{'mean':>9s}{'std':>9s}{'difference':>12s}", end="")
    print(f"   of any step{'CPU s min':>11s}{'median':>8s}{'TRL / ours':>12s}")
    for name, curves in losses.items():
        finals = [_final(curve) for curve in curves]
        pairs = list(zip(curves, losses[TRL], strict=True))
        difference = max(abs(_final(one) - _final(other)) for one, other in pairs)
        of_any = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
        ours, theirs = ([step for of_seed in seconds[who] for step in of_seed[1:]] for who in (name, TRL))
        print(
            f"{name:22s}{curves[0][0]:11.4f}{'':9s}{''.join(f'{x:9.4f}' for x in finals)}{statistics.mean(finals):9.4f}"
            f"{statistics.stdev(finals):9.4f}{difference:12.2e}{of_any:14.2e}{min(ours):11.3f}{statistics.median(ours):8.3f}"
            f"{statistics.median(theirs) / statistics.median(ours):12.2f}"
        )


def _final(curve: list[float]) -> float:
    return statistics.mean(curve[-LAST:])


def _draw(found: dict[str, Curves], path: Path) -> Path:
    """Draw TRL's curves broad and light, ours thin on top of them."""
    figure, axes = plt.subplots(1, len(found), figsize=(6.5 * len(found), 4.2), squeeze=False, layout="constrained")
    for axis, (name, losses) in zip(axes[0], found.items(), strict=True):
        for i, (contender, curves) in enumerate(losses.items()):
            for seed, curve in zip(SEEDS, curves, strict=True):
                style = (
                    {"linewidth": 5, "alpha": 0.35} if contender == TRL else {"linewidth": 1.2, "linestyle": ("-", ":")[i - 1]}
                )
                label = f"{contender}, seed {seed}"
                axis.plot(range(1, len(curve) + 1), curve, color=f"C{seed}", label=label, **style)
        axis.set(title=f"{name} of recipes/tiny", xlabel="step", ylabel="loss")
        axis.legend(fontsize=7)
    figure.savefig(path.with_suffix(".png"), dpi=150)
    plt.close(figure)
    return path.with_suffix(".png")

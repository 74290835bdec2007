"""The entry point of every rank: read the recipe, join the world, then coordinate (rank 0) or serve."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from pipeline import algorithms, config, node_checks, rpc
from pipeline.algorithms.algorithm import OnlineAlgorithm
from pipeline.checkpoints import verification
from pipeline.checkpoints.checkpoint import Checkpoints, kept, storage_timeout_s
from pipeline.config import Recipe, refuse
from pipeline.coordination import collectors
from pipeline.coordination.colocation import Colocation
from pipeline.coordination.refit_coordinator import RefitCoordinator
from pipeline.coordination.run_logger import RunLogger
from pipeline.coordination.run_progress import RunProgress
from pipeline.coordination.run_saver import RunSaver
from pipeline.coordination.scoring import Scoring
from pipeline.coordination.teacher_samples import TeacherSamples
from pipeline.coordination.training_run import TrainingRun
from pipeline.coordinator import run_offline, run_online
from pipeline.data import epochs
from pipeline.data.chat import load_tokenizer
from pipeline.data.mixture import Mixture, build_streams
from pipeline.data.stream import Stream
from pipeline.files import small_files
from pipeline.files.storage import RetryPolicy, retrying, wait_for
from pipeline.job.attempt import Attempt
from pipeline.job.deadline import Deadline
from pipeline.job.startup import SETTING_UP, Startup
from pipeline.job.watchdog import Failure, Watchdog
from pipeline.job.world import Activity, RankInfo, WorkerGroups, World, connect, join, leave, open_store, wait_for_all
from pipeline.monitor import running
from pipeline.monitor.steps import StepMonitor
from pipeline.recipe import user_code
from pipeline.refit.broadcast import BroadcastRefit
from pipeline.refit.planned import PlannedRefit
from pipeline.refit.protocol import Refit
from pipeline.roles import EnvironmentRole, GenerateRole, JudgeRole, RewardRole, TrainRole
from pipeline.rpc import RpcClient, RpcGroup
from pipeline.seams import job_events
from pipeline.steering.live_changes import Steering
from pipeline.types import DataParallelRank, Prompt


def main(run_dir: Path) -> None:
    """Run this rank to its end. Raises the error that ended the run; the first failure is in the attempt's failure.json."""
    wait_for(run_dir / "recipe.yaml")
    recipe = config.read(run_dir / "recipe.yaml", may_import=lambda path, folders: folders)
    user_code.search_in(recipe.module_folders)
    timeouts = recipe.cluster.timeouts
    info, workers = RankInfo.from_environment(run_dir), WorkerGroups.of(recipe)
    try:
        world = World(info, workers, open_store(info, timeouts.join, timeouts.silence))
    except Exception as error:
        Failure.of(error, info, workers, Activity()).record(info.folder)
        raise
    world.timeline.write(info.folder)
    client = RpcClient(world) if world.rank == 0 else None
    watchdog = Watchdog(world, timeouts, *([client.overdue] if client else []))
    startup = Startup(info.folder, workers.by_component(), watchdog.activities) if client else Startup()
    try:
        watchdog.start()
        startup.enter("join the world")
        wait_for_all(world, timeouts.join)
        join(world)
        startup.enter("check the nodes")
        node_checks.check(world, recipe.cluster, config.needs_triton(recipe, world.component))
        connect(world, recipe.policy.generation.refit_transport == "broadcast")
        sampler = running.start(world, recipe, run_dir)
        with world.phase("", verb="coordinate" if client else "serve"):
            role = _role(recipe, world)
            if sampler:
                watchdog.sample = lambda: sampler.encoded
                if isinstance(role, GenerateRole | JudgeRole):
                    sampler.add(role.readings)
            if client:
                job_events.emit(lambda observer: observer.started(run_dir))
                if isinstance(role, GenerateRole):
                    _evaluate(recipe, run_dir, world, client, role, startup)
                else:
                    assert isinstance(role, TrainRole)  # rank 0 trains
                    monitor = running.of_steps(world, recipe, sampler, watchdog.samples)
                    _coordinate(recipe, run_dir, world, client, role, startup, monitor)
                startup.end()
                rpc.stop(world, client.leading_role)
                job_events.emit(lambda observer: observer.ended(run_dir))
            else:
                rpc.serve(world, role)
    except Exception as error:
        watchdog.fail(error)
        raise
    watchdog.stop()
    if sampler:
        sampler.stop()
    world.timeline.close()
    leave(world, timeouts.silence)


def _role(recipe: Recipe, world: World) -> TrainRole | GenerateRole | RewardRole | JudgeRole | EnvironmentRole:
    if world.component == "environment":
        return EnvironmentRole(world)
    refit = _refit(recipe, world) if config.generates(recipe) and config.trains(recipe) else None
    seed = config.section(recipe).seed
    if world.component == "train":
        return TrainRole(recipe, seed, world, algorithms.build(recipe), refit)
    if world.component == "reward":
        return RewardRole(recipe, seed, world)
    if world.component == "judge":
        return JudgeRole(recipe, seed, world)
    return GenerateRole(recipe, seed, world, refit)


def _refit(recipe: Recipe, world: World) -> Refit:
    generation = recipe.policy.generation
    if generation.refit_transport == "broadcast":
        return BroadcastRefit(world, generation.refit_cfg.bucket_bytes)
    precision, ipc = getattr(torch, recipe.policy.precision), config.refits_by_ipc(recipe)
    return PlannedRefit(world, generation.refit_cfg, precision, generation.refit_transport, ipc)


def _coordinate(
    recipe: Recipe,
    run_dir: Path,
    world: World,
    client: RpcClient,
    role: TrainRole,
    startup: Startup,
    monitor: StepMonitor | None,
) -> None:
    startup.enter(SETTING_UP)
    timeouts, workers, algorithm = recipe.cluster.timeouts, world.workers, algorithms.build(recipe)
    storage_s = storage_timeout_s(timeouts)
    attempt = Attempt(world.info.folder, storage_s)
    attempt.claim()
    job_events.emit(lambda observer: observer.claimed(recipe, run_dir, attempt.folder))
    train = RpcGroup(client, world, workers.train, TrainRole, timeouts, role)
    retry = RetryPolicy(storage_s, attempt.check, functools.partial(kept, run_dir))
    checkpoints = _unlock(recipe, run_dir, attempt, retry, train)
    generate = RpcGroup(client, world, workers.generate, GenerateRole, timeouts)
    reward = RpcGroup(client, world, workers.reward, RewardRole, timeouts)
    shared = workers.colocated
    served_judge = RpcGroup(client, world, workers.judge, JudgeRole, timeouts)
    engines_up, judges_up = generate.call(GenerateRole.setup), reward.call(RewardRole.setup)
    served_judge_up = served_judge.call(JudgeRole.setup)
    if shared:  # vLLM measures free memory as it starts, so nothing else may allocate or free
        engines_up.result()
        generate.call(GenerateRole.sleep, False).result()
    with world.phase("load data", verb="setup"):
        tokenizer = load_tokenizer(recipe.policy.tokenizer)
        stream, validation = build_streams(recipe, tokenizer)
        _refuse_too_few(recipe, stream, checkpoints)
    data_ranks = train.call(TrainRole.setup).result()
    engines_up.result()
    served_judge_up.result()
    judges, refits = judges_up.result(), None
    if config.generates(recipe):
        refits = RefitCoordinator(recipe, workers, train, generate, role.shapes, world.nodes())
    run = _training_run(
        recipe=recipe,
        run_dir=run_dir,
        world=world,
        train=train,
        data_ranks=data_ranks,
        colocation=Colocation(shared, train, generate, refits),
        checkpoints=checkpoints,
        attempt=attempt,
        startup=startup,
        tokenizer=tokenizer,
        monitor=monitor,
    )
    if config.generates(recipe):
        engines = [RpcGroup(client, world, engine, GenerateRole, timeouts) for engine in workers.engines]
        judge = _judge(recipe, train, data_ranks, reward, judges, tokenizer)
        section = config.section(recipe)
        assert isinstance(section, config.OnlineConfig) and isinstance(algorithm, OnlineAlgorithm)
        rollouts = collectors.build(recipe.algorithm, section, recipe.policy.generation, engines, judge)
        prompts = [item for item in validation if isinstance(item, Prompt)]
        step = run_online(run, algorithm, rollouts, stream, prompts)
    else:
        step = run_offline(run, algorithm, stream, [item for item in validation if not isinstance(item, Prompt)])
    if not run.progress.left:
        _end(recipe, run_dir, checkpoints, step, run.progress.stopped)
    job_events.emit(lambda observer: observer.left(bool(run.progress.left)))


def _refuse_too_few(recipe: Recipe, stream: Stream | Mixture, checkpoints: Checkpoints) -> None:
    """Raise RecipeError if the records fill no step. A resumed run may have used all of them."""
    if not config.only_evaluates(recipe) and checkpoints.latest() is None:
        refuse(filter(None, [epochs.of_records(recipe, stream.usable).problem()]))


def _training_run(
    recipe: Recipe,
    run_dir: Path,
    world: World,
    train: RpcGroup[TrainRole],
    data_ranks: list[DataParallelRank],
    colocation: Colocation,
    checkpoints: Checkpoints,
    attempt: Attempt,
    startup: Startup,
    tokenizer: PreTrainedTokenizerBase,
    monitor: StepMonitor | None,
) -> TrainingRun:
    deadline = Deadline.of_attempt(recipe.checkpointing, run_dir, attempt.folder)
    logger = RunLogger(
        recipe,
        run_dir,
        retry=checkpoints.retry,
        key=checkpoints.writing_key,
        tokenizer=tokenizer,
        phase=world.phase,
        monitor=monitor,
        learning=running.of_learning(world, recipe, tokenizer),
    )
    saver = RunSaver(recipe.checkpointing, checkpoints, train, colocation, attempt, deadline, logger)
    return TrainingRun(
        recipe=recipe,
        train=train,
        data_ranks=data_ranks,
        colocation=colocation,
        checkpoints=checkpoints,
        attempt=attempt,
        timeline=world.timeline,
        startup=startup,
        steering=Steering(recipe, run_dir, train, checkpoints.retry),
        logger=logger,
        saver=saver,
        progress=RunProgress(recipe, deadline, attempt, saver),
        teacher_samples=_teacher_samples(recipe, train, tokenizer),
    )


def _teacher_samples(recipe: Recipe, train: RpcGroup[TrainRole], tokenizer: PreTrainedTokenizerBase) -> TeacherSamples:
    """Return what writes samples for teachers; train ranks learn which of the teachers' tokens GOLD matches."""
    samples = TeacherSamples(recipe, tokenizer)
    if algorithms.build(recipe).needs.own_top_k and recipe.loss_fn.kl_type == "gold":
        train.call(TrainRole.match_tokens, samples.matched).result()
    return samples


def _judge(
    recipe: Recipe,
    train: RpcGroup[TrainRole],
    data_ranks: list[DataParallelRank],
    reward: RpcGroup[RewardRole],
    judges: list[DataParallelRank],
    tokenizer: PreTrainedTokenizerBase,
) -> Scoring | None:
    """Return the Scoring by the reward model, on ranks of its own or on the train ranks; None if the recipe has no model."""
    if not config.reward_model(recipe):
        return None
    if reward.ranks:
        return Scoring(recipe, functools.partial(reward.scatter, RewardRole.score), judges, tokenizer)
    return Scoring(recipe, functools.partial(train.scatter, TrainRole.score), data_ranks, tokenizer)


def _end(recipe: Recipe, run_dir: Path, checkpoints: Checkpoints, step: int, stopped: str | None) -> None:
    """Link the last export and write done.json. step: the run's last one. stopped: why it stopped before `max_num_steps`."""
    record: dict[str, Any] = {"step": step}
    if config.only_evaluates(recipe):
        record["evaluation"] = True
    else:
        checkpoints.link_latest(run_dir / "hf", "hf")
        record |= {"early_stop": stopped} if stopped else {}
    _write_done(run_dir, record, checkpoints.retry)


def _unlock(recipe: Recipe, run_dir: Path, attempt: Attempt, retry: RetryPolicy, train: RpcGroup[TrainRole]) -> Checkpoints:
    """Return the run's checkpoints, once every train rank has their key. Raises RecipeError before any model is loaded."""
    key = verification.obtain_key(recipe.checkpointing)
    checkpoints = Checkpoints(run_dir, attempt.name, recipe.checkpointing, retry, key)
    verification.check_key(checkpoints.latest(), key)
    if key:
        train.call(TrainRole.unlock, key.fingerprint).result()
    return checkpoints


def _evaluate(recipe: Recipe, run_dir: Path, world: World, client: RpcClient, role: GenerateRole, startup: Startup) -> None:
    from pipeline.evaluation.evaluation_loop import evaluate  # imports much that a training does not need

    storage_s = storage_timeout_s(recipe.cluster.timeouts)
    attempt = Attempt(world.info.folder, storage_s)
    retry = RetryPolicy(storage_s, attempt.check)
    if evaluate(recipe, attempt, retry, world, client, role, startup):
        _write_done(run_dir, {"step": recipe.evaluate.step or 0}, retry)
    role.close()


def _write_done(run_dir: Path, record: dict[str, Any], retry: RetryPolicy) -> None:
    done = run_dir / "done.json"
    retrying(lambda: small_files.write(done, record), "writing that the run is complete", done, retry)

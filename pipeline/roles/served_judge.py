"""Serve a generative judge on ranks of its own: engines with fixed weights that environments ask over HTTP.

The first rank of an engine leads it: it has the server (`chat_server.py`), and steps the engine while requests are open. Its
peers follow. Between requests the leader waits for the next one, or for a verb.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import generate
from pipeline.checkpoints import verification
from pipeline.config import Recipe, served_judge_policy, serves_judge
from pipeline.data.chat import load_tokenizer
from pipeline.data.judge_chat import JudgeChat
from pipeline.data.stop_strings import text_before_stop
from pipeline.environments.environment import ServedJudge
from pipeline.generate.generate_backend import GenerateBackend
from pipeline.job.world import World, own_address
from pipeline.rollout.lockstep import STEP, VERB, Lockstep, Move, apply_move, engine_readings, working
from pipeline.rpc import verb
from pipeline.train.saved_weights import model_weights
from pipeline.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.roles.chat_server import ChatServer


class JudgeRole:
    """Holds an engine of the judge."""

    def __init__(self, recipe: Recipe, seed: int, world: World) -> None:
        """Listen for requests if this rank leads its engine. `setup` builds the engine."""
        self._recipe, self._seed, self._world = recipe, seed, world
        self._policy = served_judge_policy(recipe)
        engine = world.workers.engine(world.rank)
        self._place = len(engine), engine.index(world.rank)
        self._lockstep = Lockstep(world.own if len(engine) > 1 else None)
        self._built: GenerateBackend | None = None
        self._open: set[str] = set()  # requests in the engine
        self._server: ChatServer | None = None  # on the leader
        self.wakeup = threading.Event()
        if self._place[1] == 0:
            from pipeline.roles.chat_server import ChatServer  # imports aiohttp, which train ranks may lack

            self._server = ChatServer(own_address(world.store), world.store.code(b"judge", b"").hex(), self.wakeup)
            world.store.set(_name(world.workers.judge_engines.index(engine)), self._server.address)

    @verb("setup")
    def setup(self) -> None:
        """Build the engine, load the weights of the model's files, and serve."""
        tokenizer = load_tokenizer(self._policy.tokenizer)
        chat = JudgeChat(tokenizer, self._policy.tokenizer.chat_template_kwargs, "judge.tokenizer.chat_template")
        with self._world.phase("load engine"):
            backend = generate.build(self._policy, *self._place, self._seed)
        with self._world.phase("verify weights"):
            share = self._place[1], self._place[0]
            verification.check_export(
                "judge.model_name", Path(self._policy.model_name), self._recipe.checkpointing.verify, share
            )
        with self._world.phase("load weights"):
            update = backend.update()
            update.load(model_weights(self._policy, self._seed))
            update.commit(0)
        self._built = backend
        if self._server:
            from pipeline.roles.chat_server import ServedChat  # as above

            sizes = self._policy.generation.vllm_cfg.max_model_len, len(tokenizer)
            self._server.serve(ServedChat(chat.encode, functools.partial(_text, tokenizer), *sizes, self._seed))

    def work(self, verb_waits: Callable[[], bool]) -> None:
        """Answer requests, or follow the engine's leader, until a verb arrives."""
        if self._server is None:
            self._lockstep.follow(self._built, self._world)
            return
        while not verb_waits():
            if self._open or self._server.has_news:
                with working(self._world):
                    while (self._open or self._server.has_news) and not verb_waits():
                        self._step(self._server)
            else:
                self.wakeup.wait()
                self.wakeup.clear()
        self._lockstep.announce(VERB)

    def _step(self, server: ChatServer) -> None:
        assert self._built, "the server refuses requests before verb 'setup'"
        requests, gone = server.take()
        requests = [request for request in requests if request.id not in gone]
        move = Move([name for name in gone if name in self._open], requests)
        self._open |= {request.id for request in requests}
        self._lockstep.announce(STEP, move)
        for completion in apply_move(move, self._built, self._lockstep.clock):
            self._open.discard(completion.id)
            server.reply(completion)

    def readings(self) -> dict[str, float]:
        """Return the engine's load by names of `pipeline.monitor.readings`; {} before it is built. Any thread may call this."""
        return engine_readings(self._built, self._lockstep.clock)

    def close(self) -> None:
        """End the server."""
        if self._server:
            self._server.close()


def served_judge(recipe: Recipe, world: World) -> ServedJudge | None:
    """Return the endpoints of the job's judge, as soon as its ranks listen; None if the job serves none."""
    if not serves_judge(recipe):
        return None
    addresses = [world.store.get(_name(i)).decode() for i in range(len(world.workers.judge_engines))]
    return ServedJudge(tuple(addresses), served_judge_policy(recipe).tokenizer.name)


def _text(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    return text_before_stop(tokenizer, completion.tokens.tolist(), completion.stop)


def _name(engine: int) -> str:
    return f"judge/{engine}"

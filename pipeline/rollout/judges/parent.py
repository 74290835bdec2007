"""The process that loads an engine's environments, forks judges, and ends those that exceed their time.

It is started as `python -m pipeline.rollout.judges.parent SOCKET RANK`. SOCKET is an inherited descriptor, and RANK the process
id of the engine's rank. The process has one thread and judges no answer itself, so it can always read messages and end judges.
It ends with the rank, and its judges end with it. Signals that ask the rank to stop do not end it, because the rank's last step
still needs answers. If memory runs out, the kernel kills judges first, then this process, then the rank.

Forks cannot share an environment that starts threads while it is built. The process reports such an environment. The process
that replaces it does not build that environment; each judge builds it for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from pipeline.config.environments import reads_calls
from pipeline.data.call_parsers import CallParser
from pipeline.data.chat import load_tokenizer
from pipeline.data.observations import Observations
from pipeline.environments import build_environments, episode_folder
from pipeline.environments.environment import AgentEnvironment, Environment
from pipeline.files import rank_log
from pipeline.files.encoding import decode
from pipeline.recipe import user_code
from pipeline.rollout.agents.agent_function import AgentFunction
from pipeline.rollout.engine_client import load_function
from pipeline.rollout.judges import judge_process
from pipeline.rollout.judges.conversation_text import ConversationText
from pipeline.rollout.judges.environment_steps import (
    EnvironmentSettings,
    EnvStepper,
    brief,
    encodable,
)
from pipeline.rollout.judges.function_steps import FunctionStepper
from pipeline.rollout.judges.group import CLOSE_S, ForkedJudge, JudgeGroup
from pipeline.rollout.judges.judge_process import EnvCommand, EnvReply, Progress, frame, read_message
from pipeline.sandbox import linux, processes

if TYPE_CHECKING:
    from pipeline.config import PolicyConfig
    from pipeline.rollout.agents.policy_serving import PolicyServing

logger = logging.getLogger("pipeline.rollout.judges.parent")  # __name__ is "__main__", of which no format is known

NAME = b"hetstep-env"
"""The process name that ps and top show; at most 15 bytes."""
OOM_SCORE = 500
"""This process's value for linux.raise_oom_score. A rank has 0, a judge 750."""
ORPHANS_S = 5.0  # for what a judge left behind to end by itself, such as the guard of a sandboxed program


class EnvReport(msgspec.Struct, array_like=True):
    """A report to the rank: what has happened since the last one. The first one states that the environments are loaded."""

    begun: list[int] = []  # calls that a judge has taken
    replies: list[EnvReply] = []
    apart: dict[str, int] = {}  # environments that each judge must build for itself -> their workers; this process then ends
    error: str = ""  # type of the exception that ends the process
    message: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> EnvReport:
        """Return the report of an exception, with its traceback."""
        texts = map(encodable, (type(error).__name__, str(error), "".join(traceback.format_exception(error))))
        return cls([], [], {}, *texts)


class Parent:
    """Serves the rank."""

    def __init__(self, connection: socket.socket, settings: EnvironmentSettings) -> None:
        """Build the environments. Raises the errors of `registry.build`, which name the key, and of `Observations`."""
        self._connection, self._settings = connection, settings
        self._tokenizer = load_tokenizer(settings.tokenizer)
        self._observations = Observations(self._tokenizer, settings.tokenizer, settings.chat) if settings.turns > 1 else None
        self._calls = self._load_call_parser()
        self._function = load_function(settings.function) if settings.function else None
        self._serving = self._load_serving(settings.policy) if settings.policy else None
        linux.raise_open_files()  # each open session of an interpreter uses four
        self.built: dict[str, Environment] = {}
        self.threaded: dict[str, int] = {}  # environments that have started threads -> their workers
        for name in settings.env:
            if name in settings.apart:
                continue
            threads = len(os.listdir("/proc/self/task"))  # also those of libraries, such as OpenMP's or CUDA's
            self.built |= build_environments.build(settings.env, [name], settings.judge, self._calls)
            if len(os.listdir("/proc/self/task")) > threads:
                self.threaded[name] = self.built[name].workers
        self._by_pid: dict[int, tuple[JudgeGroup, ForkedJudge]] = {}
        self._report = EnvReport()

    def _load_serving(self, policy: PolicyConfig) -> PolicyServing:
        from pipeline.rollout.agents import agent_endpoint  # noqa: F401 - so that judges share its memory
        from pipeline.rollout.agents.policy_serving import PolicyServing  # imports vLLM

        template = self._tokenizer.chat_template
        return PolicyServing(policy, template if isinstance(template, str) else None, self._observations)

    def _load_call_parser(self) -> CallParser | None:
        """Return the parser of tool calls, loaded once for all judges; None if no environment needs it."""
        settings = self._settings
        if not reads_calls(settings.env):
            return None
        return CallParser(self._tokenizer, settings.tokenizer, settings.chat, settings.tool_parser, settings.reasoning_parser)

    async def serve(self) -> None:
        """Serve the rank until it closes the environments."""
        loop, self._failed = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        loop.set_exception_handler(self._note_error)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        self._started = set(processes.children(os.getpid()))  # by the environments, as they were built
        self._groups = {
            name: JudgeGroup(name, self.built.get(name), self._settings, self._fork, self._put) for name in self._settings.env
        }
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._flush()
        serving = asyncio.ensure_future(self._take_commands(reader))
        await asyncio.wait({serving, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            raise self._failed.result()
        serving.result()
        await asyncio.gather(*(group.close() for group in self._groups.values()))
        self._end_orphans()

    async def _take_commands(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                command, content = await read_message(reader, EnvCommand)
            except (asyncio.IncompleteReadError, OSError):
                os._exit(1)  # the rank is gone
            if command.call:
                self._groups[command.environment].submit(command, content)
            elif command.request:
                self._groups[command.environment].tell(command.episode, content)
            elif command.episode:
                for group in self._groups.values():
                    group.forget(command.episode, content)
            else:
                return

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "exception" not in context:
            logger.warning(context["message"])
        elif not self._failed.done():
            self._failed.set_result(context["exception"])

    def _put(self, event: EnvReply | int) -> None:
        """Report a reply, or the number of a call that has begun."""
        if not self._report.begun and not self._report.replies:
            asyncio.get_running_loop().call_soon(self._flush)
        if isinstance(event, int):
            self._report.begun.append(event)
        else:
            event.traceback = ""
            self._report.replies.append(event)

    def _flush(self) -> None:
        report, self._report = self._report, EnvReport()
        self._writer.write(frame(report))

    def _fork(self, group: JudgeGroup) -> ForkedJudge:
        parent_end, judge_end = socket.socketpair()
        progress = Progress()
        progress.begin("build")
        pid = os.fork()
        if not pid:
            self._become_judge(group, judge_end, parent_end, progress)
        judge_end.close()
        with contextlib.suppress(OSError):  # the child does the same
            os.setpgid(pid, pid)
        forked = ForkedJudge(pid, parent_end, progress)
        self._by_pid[pid] = group, forked
        return forked

    def _become_judge(
        self, group: JudgeGroup, connection: socket.socket, parent_end: socket.socket, progress: Progress
    ) -> NoReturn:
        status = 1
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asyncio._set_running_loop(None)  # the loop is the parent's
            asyncio.set_event_loop(None)
            for sock in (self._connection, parent_end, *(judge.connection for _, judge in self._by_pid.values())):
                sock.close()
            judge_process.run(connection, progress, group.limits, functools.partial(self._stepper, group))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(status)

    def _stepper(self, group: JudgeGroup) -> EnvStepper | FunctionStepper:
        parts = self._settings.env, [group.name], self._settings.judge, self._calls
        built = {} if group.environment else build_environments.build(*parts)
        environment = group.environment or built[group.name]
        function = self._function
        if isinstance(environment, AgentEnvironment):
            assert self._serving
            function = AgentFunction(environment, self._serving)
        if function is None:
            return EnvStepper(environment, self._tokenizer, self._observations, self._settings.max_steps)
        parts = self._tokenizer, self._settings.tokenizer, self._settings.chat, self._observations
        return FunctionStepper(function, environment, ConversationText(*parts), self._settings.max_steps)

    def _reap(self) -> None:
        """Collect the children that have ended: judges, and processes that ended judges have left."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                group, gone = self._by_pid.pop(ended.si_pid, (None, None))
                if gone is not None:
                    gone.kill()  # its process group, whose number is not free before the next line
                    episode_folder.remove_left()
                _, status = os.waitpid(ended.si_pid, 0)
                if group is not None and gone is not None:
                    gone.ended.set_result(os.waitstatus_to_exitcode(status))
                    group.gone(gone)
                    asyncio.get_running_loop().call_later(ORPHANS_S, self._end_orphans)

    def _end_orphans(self) -> None:
        """Kill the processes that ended judges have left, which are now children of this process."""
        for child in {*processes.children(os.getpid())} - self._started - self._by_pid.keys():
            for pid in (child, *processes.descendants(child)):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the environments, and wait at most CLOSE_S for it."""

        def close() -> None:
            for name, environment in self.built.items():
                try:
                    environment.close()
                except Exception as error:
                    logger.warning(f"env.{name}: close raised {brief(error)}")

        thread = threading.Thread(target=close, name="close", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def run(connection: socket.socket, rank: int) -> None:
    """Serve the rank until it closes the environments. Call it in the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which an environment's subprocesses would inherit
    linux.die_with_parent()
    if os.getppid() != rank:  # the rank died before die_with_parent
        return
    linux.prctl(linux.PR_SET_NAME, NAME)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    with contextlib.suppress(OSError):
        linux.raise_oom_score(OOM_SCORE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # forks do not have the threads of a tokenizer
    rank_log.set_up()
    length = connection.recv(4, socket.MSG_WAITALL)
    if len(length) < 4:  # the rank has ended, or needs no environments
        return
    try:
        settings = decode(connection.recv(struct.unpack("<I", length)[0], socket.MSG_WAITALL), EnvironmentSettings)
        user_code.search_in(settings.folders)
        episode_folder.remove_left()
        parent = Parent(connection, settings)
        if parent.threaded:
            connection.sendall(frame(EnvReport(apart=parent.threaded)))
        else:
            gc.collect()
            gc.freeze()  # else the first garbage collection of a judge copies all memory
            asyncio.run(parent.serve())
        parent.close()
    except MemoryError:
        raise  # another process may find the memory
    except Exception as error:
        connection.setblocking(True)
        connection.sendall(frame(EnvReport.of(error)))


if __name__ == "__main__":
    inherited = int(sys.argv[1])
    os.closerange(3, inherited)
    os.closerange(inherited + 1, os.sysconf("SC_OPEN_MAX"))
    run(socket.socket(fileno=inherited), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # threads of an environment may hang

"""Plans of the service end with their time, their client and the service."""

import asyncio
import os
import signal

import psutil
import pytest

from launch.serving import plan_process, plans
from launch.serving.plans import ClientGone, Plans
from tests.launch.waiting import wait_until
from tests.problems import refused


async def stays() -> bool:
    return False


async def leaves() -> bool:
    return True


def planning() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "launch.serving.plan_process" in " ".join(each.cmdline())]


async def hang(count: int = 1) -> list[int]:
    """Stop the processes of `count` plans, as a file system that hangs does."""
    while len(found := planning()) < count:
        await asyncio.sleep(0.01)
    for each in found:
        os.kill(each.pid, signal.SIGSTOP)
    return [each.pid for each in found]


def test_a_plan_that_takes_too_long_is_ended():
    async def run() -> list[int]:
        work = asyncio.ensure_future(Plans(1.0).make("sam", "tiny_sft", {}, stays))
        pids = await hang()
        with refused(("recipe", "timed-out")):
            await work
        return pids

    assert not any(map(psutil.pid_exists, asyncio.run(run())))


def test_a_plan_ends_when_its_client_leaves():
    async def run() -> list[int]:
        work = asyncio.ensure_future(Plans(600.0).make("sam", "tiny_sft", {}, leaves))
        pids = await hang()
        with pytest.raises(ClientGone):
            await work
        return pids

    assert not any(map(psutil.pid_exists, asyncio.run(run())))


def test_a_user_has_few_plans_and_others_go_on(monkeypatch):
    monkeypatch.setattr(plans, "MAX_WAITING", 3)

    async def run() -> dict:
        made = Plans(600.0)
        works = [asyncio.ensure_future(made.make("sam", "tiny_sft", {}, stays)) for _ in range(3)]
        await hang(plans.OF_USER)
        with refused(("recipe", "in-use")):
            await made.make("sam", "tiny_sft", {}, stays)
        assert len(planning()) == plans.OF_USER
        reply = await made.make("sue", "tiny_sft", {"cluster.executor": "local"}, stays)
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        return reply

    assert asyncio.run(run())["plan"]["gpus"] == 0
    wait_until(lambda: not planning(), "the end of the plans", 10)


def test_the_process_reads_no_variable_and_imports_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HETSTEP_TEST_PRIVATE", "value-of-the-service")
    for text in ("${oc.env:HETSTEP_TEST_PRIVATE}", '${oc.decode:"\\${oc.env:HETSTEP_TEST_PRIVATE}"}'):
        reply = plan_process.plan("tiny_sft", {"policy.model_name": text})
        assert "problems" in reply and "value-of-the-service" not in str(reply)
    (tmp_path / "evilmod.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\ndef right(prompt, answer): ...\n")
    monkeypatch.setenv("HETSTEP_TRUSTED", str(tmp_path))
    plan_process.plan("tiny_grpo", {"env.math.kind": "evilmod.right", "module_folders": [str(tmp_path)]})
    assert not (tmp_path / "mark").exists()

"""The tool `shell`: what the policy reads, and what submission refuses."""

import re
from pathlib import Path

import pytest

from launch.preflight import container_images, installed
from pipeline import config
from pipeline.environments.shell_tool import ShellTool
from pipeline.environments.tool import ToolError
from pipeline.environments.tools import ToolConfig, build_tool
from pipeline.sandbox import sif
from tests.sandbox.images import layout

LIMITS = {"wall_s": 10.0, "memory_bytes": 128 << 20, "scratch_bytes": 8 << 20, "output_bytes": 1000, "processes": 16}


@pytest.fixture(scope="module")
def tool(image_root: Path) -> ShellTool:
    made = build_tool(ToolConfig("shell", {"image": str(image_root), **LIMITS}))
    assert isinstance(made, ShellTool)
    return made


def test_what_the_policy_reads(tool: ShellTool):
    one, other = tool.open(), tool.open()
    assert one.call({"command": "cd /opt && echo mine > /root/file"}, 20.0) == ""
    assert one.call({"command": "pwd; cat /root/file; printf 'no end'; false"}, 20.0) == "/opt\nmine\nno end\n[exit status 1]"
    assert other.call({"command": "cat /root/file 2>/dev/null || echo none"}, 20.0) == "of root\n"
    for command, text in [
        ("echo so; sleep 60", r"^so\n(?s:.*)\[the command did not end within 0.5 s and was killed\]$"),
        (
            "exec sleep 60",
            r"killed; a new shell begins in the image's folder, with no variables or jobs, and the same files\]$",
        ),
        ("echo bye; exit 2", r"^bye\n\[the shell ended; a new shell begins"),
    ]:
        with pytest.raises(ToolError, match=text):
            one.call({"command": command}, 0.5)
    assert one.call({"command": "pwd; cat /root/file"}, 20.0) == "/\nmine\n"
    assert "bytes cut" in one.call({"command": "seq 10000"}, 20.0)
    for session in (one, other, one):
        session.close()


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ("{image: /there/is/none.sqsh}", ("image", "file-not-found", "which does not exist. Try a squashfs file")),
        ("{image: FILE}", ("image", "bad-format", "a file that is no squashfs")),
        ("{image: CUT}", ("image", "bad-format", "a SIF file whose end is missing")),
        ("{image: near.sqsh}", ("image", "bad-format", "expected an absolute path")),
        ("{}", ("image", "missing-value", "")),
        ("{image: FILE, sandbox: none}", ("sandbox", "unsupported", "a container needs isolation")),
        ("{image: FILE, readable: [/opt]}", ("readable", "has-no-effect", "")),
    ],
)
def test_what_submission_refuses(kwargs: str, expected: tuple[str, str, str], tmp_path: Path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "cut").write_bytes(bytes(sif.MAGIC_AT) + sif.MAGIC)
    tools = f"env.t.kwargs={{judge: addition, tools: {{bash: {{kind: shell, kwargs: {kwargs}}}}}}}"
    loaded = config.inspect(
        "tiny_grpo", ["env.t.kind=tools", tools.replace("FILE", f"{tmp_path}/file").replace("CUT", f"{tmp_path}/cut")]
    )
    problems = [*loaded.problems, *installed.sandbox_problems(loaded.recipe, "slurm", [])]
    key, code, text = expected
    found = [problem for problem in problems if problem.key == f"env.t.kwargs.tools.bash.kwargs.{key}"]
    assert [problem.code for problem in found] == [code] and re.search(re.escape(text), found[0].message), problems


def test_containers_of_ranks_must_show_the_image(tmp_path: Path):
    """Under FOLDER:TAG, the folder."""
    image = layout(tmp_path / "oci", [])
    tools = f"env.t.kwargs={{judge: addition, tools: {{bash: {{kind: shell, kwargs: {{image: '{image}:latest'}}}}}}}}"
    (tmp_path / "ranks.sqsh").write_text("")
    component = f"cluster.generate.container_image={tmp_path}/ranks.sqsh"
    recipe = config.inspect("tiny_grpo", ["env.t.kind=tools", tools, component]).recipe
    (problem,) = [problem for problem in container_images.problems(recipe, []) if "the image of" in problem.message]
    assert (problem.key, problem.code) == ("cluster.generate.container_mounts", "not-mounted")
    assert f"Try {image}:{image}" in problem.message

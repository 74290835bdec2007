"""Check that what the pages name exists: files, headings, recipes, keys, commands and their arguments, modules, targets."""

import ast
import functools
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import yaml

from launch import submit
from launch.recipes.prime_rl import prime_rl_translation
from launch.recipes.verl import verl_translation
from launch.terminal import command_line
from pipeline import config
from pipeline.config import RecipeError, reference
from tests.docs import pages
from tests.docs.pages import OURS, PAGES, ROOT

RECIPES = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
THEIRS = {key for keys in yaml.safe_load((ROOT / "tests/nemo_rl/meanings.yaml").read_text()).values() for key in keys}
NOT_OURS = {  # keys of NeMo-RL and of examples that the pages name
    *("checkpointing.checkpoint_dir", "logger.log_dir", "sft.val_global_batch_size"),
    *("policy.dtensor_cfg.env_vars", "policy.dynamic_batching.enabled", "value.megatron_cfg.optimizer"),
}
OF_EXAMPLES = ("focal.", "median_grpo.", "logger.loss_file")  # keys that worked examples add
PLACES = {
    "NAME": "tiny_grpo",
    "RUN_DIR": "runs/x",
    "N": "1",
    "DIR": "out",
    "FOLDER": "out",
    "PATH": "some/model",
    "KEY": "policy",
    "CODE": "x",
}
KEYS = reference.keys()
OF_KEYS = {
    "recipes/README.md",
    "recipes/FOREIGN.md",
    "launch/README.md",
    "launch/OPERATIONS.md",
    "pipeline/algorithms/README.md",
    "pipeline/environments/README.md",
}
PACKAGES = [path.parent for room in ("launch", "pipeline") for path in sorted((ROOT / room).rglob("__init__.py"))]
OTHER_TABLES = {ROOT / "launch/recipes/nemo_rl"}  # packages whose docstring has a table of something else
ids = {"ids": lambda page: str(page.relative_to(ROOT))}


def is_theirs(key: str) -> bool:
    """Return whether NeMo-RL, verl or prime-rl has this key, or keys below it."""
    known = verl_translation.knows(key) or prime_rl_translation.knows(key)
    return known or key in THEIRS or any(other.startswith(f"{key}.") for other in THEIRS)


@pytest.mark.parametrize("package", PACKAGES, **ids)
def test_a_package_lists_modules_that_it_has(package):
    """The table in a package's docstring names its modules: `    name, other    what they do`."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text()), clean=False) or ""
    listed = re.findall(r"^ {0,6}([\w/*]+(?:\.py)?(?:, [\w/*]+(?:\.py)?)*) {2,}\S", docstring, re.MULTILINE)
    names = [name.removesuffix(".py") for names in listed for name in names.split(", ")]
    absent = [name for name in names if not [*package.glob(name), *package.glob(f"{name}.py")]]
    assert not absent or package in OTHER_TABLES, absent


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", pages.prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_are_read():
    """A test of one page may find no link, name or command there, but not on all pages."""
    assert len(PAGES) > 20 and all(pages.prose(page).strip() for page in PAGES)
    assert sum(len(pages.inline(page)) for page in PAGES) > 500
    assert sum(1 for page in OURS for _ in pages.commands(page)) > 60


@pytest.mark.parametrize("page", PAGES, **ids)
def test_links_lead_somewhere(page):
    assert pages.prose(page).strip()
    for target in re.findall(r"\]\(([^)\s]+)\)", pages.prose(page)):
        if re.match("[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), target


@pytest.mark.parametrize("page", PAGES, **ids)
def test_files_exist(page):
    made = {block.path for block in pages.blocks(page)}
    assert pages.prose(page).strip()
    for text in pages.inline(page):
        path = text.split("::")[0].rstrip("/")
        is_path = re.fullmatch(r"(pipeline|launch|recipes|tests|containers|\.github)/[\w./-]+", path) or re.fullmatch(
            r"[\w./-]+\.py", path
        )
        if is_path and path not in made and Path(path).name != "my_reward.py" and not path.startswith(("examples/", "run_")):
            assert any((folder / path).exists() for folder in (ROOT, page.parent, ROOT / "pipeline")), text


@pytest.mark.parametrize("page", OURS, **ids)
def test_recipes_exist(page):
    pattern = r"(tiny|llama\d+b|qwen[\w]*b|dapo_qwen\w+|deepscaler|deepseek_v\d)_\w+"
    assert {text for text in pages.inline(page) if re.fullmatch(pattern, text)} <= RECIPES


def keys_of(text: str) -> Iterator[str]:
    """Yield the recipe's keys in a piece of inline code: `a.b.c`, `a.b=1`, `a.b: 1`."""
    for word in re.findall(
        r"(?<![\w./-])(?:[a-z_]+\.)+(?:[\w<>*]+\.)*[\w<>]+", text.replace("cluster.<component>", "cluster.train")
    ):
        if (
            word.split(".")[0] in KEYS
            and word.split(".")[0] != "algorithm"
            and not word.endswith((".py", ".yaml", ".md", ".json"))
        ):
            yield word


@pytest.mark.parametrize("page", OURS, **ids)
def test_keys_exist(page):
    if page.name == "CHANGELOG.md" or "golden" in page.parts:
        return
    found = 0
    for text in pages.inline(page):
        for key in keys_of(text):
            if is_theirs(key) or key in NOT_OURS or key.startswith(OF_EXAMPLES):
                continue
            found += 1
            reference.explained(key)  # raises RecipeError for a key that does not exist
    assert found or str(page.relative_to(ROOT)) not in OF_KEYS


def parsed(script: str, arguments: list[str]) -> object:
    """Return what a command of launch/ makes of its arguments, which it does not carry out. Raise RecipeError."""
    module = importlib.import_module(f"launch.{Path(script).stem}")
    with mock.patch.object(
        command_line, "run", side_effect=lambda _doc, request, _command, given: command_line.parse(request, given)
    ):
        return module.main(arguments)


def filled(word: str) -> str:
    """Return an argument with its placeholders filled."""
    key, equals, value = word.strip("[]").partition("=")
    return f"{key}{equals}{PLACES.get(value, value)}"


@pytest.mark.parametrize("page", OURS, **ids)
def test_commands_are_understood(page):
    assert pages.prose(page).strip()
    for words in pages.commands(page):
        words = [word for word in words if "=" not in word or not word.split("=")[0].isupper()]  # variables before a command
        if "-m" in words:
            module = words[words.index("-m") + 1]
            if module not in ("pip", "pytest"):
                assert importlib.util.find_spec(module), words
        elif words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= TARGETS, words
        elif words[-1] == "launch/hetstep.sbatch":
            continue
        elif "launch/hetstep.sbatch" in words:
            parsed("submit", [filled(word) for word in words[words.index("launch/hetstep.sbatch") + 1 :]])
        elif script := next((word for word in words if re.fullmatch(r"launch/\w+\.py", word)), None):
            arguments = [filled(word) for word in words[words.index(script) + 1 :]]
            arguments = [word for word in arguments if word and "key=value" not in word and word != "run_dir"]
            try:
                request = parsed(script, arguments)
            except RecipeError as error:
                assert {problem.code for problem in error.problems} == {"file-not-found"}, f"{words}: {error}"
                continue
            for override in getattr(request, "overrides", []):
                key = override.partition("=")[0]
                if not key.startswith(OF_EXAMPLES) and key != "algorithm" and not is_theirs(key):
                    reference.explained(key)


def test_the_first_page_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= 128


def test_the_plan_on_the_first_page_is_what_is_printed(capsys):
    """All of its lines, in order; `...` stands for lines, or the rest of a line, that are left out."""
    (block,) = [block for block in pages.blocks(ROOT / "README.md") if "plan=true" in block.text]
    command, *shown = block.text.splitlines()
    submit.main(command.split()[3:])
    printed = iter(capsys.readouterr().out.splitlines())
    assert len(shown) > 10
    for line in shown:
        if line and line != "...":
            assert any(each == line or (line.endswith(" ...") and each.startswith(line[:-4])) for each in printed), (
                f"not printed, or not in this order: {line}"
            )


def test_the_backends_model_families_are_all_on_the_page():
    text = (ROOT / "pipeline/models/README.md").read_text()
    families = importlib.import_module("pipeline.models").FAMILIES.values()
    for file in {f"{module.__name__.rpartition('.')[2]}.py" for module in families}:
        assert f"[{file}]({file})" in text


@functools.cache
def sources() -> str:
    """Return the text of all modules."""
    return "\n".join(path.read_text() for part in ("pipeline", "launch") for path in (ROOT / part).rglob("*.py"))


@pytest.mark.parametrize("page", OURS, **ids)
def test_classes_exist(page):
    """Names such as `TrainBackend` occur in the code, or in the page's own example."""
    own = "\n".join(block.text for block in pages.blocks(page))
    assert pages.prose(page).strip()
    for text in pages.inline(page):
        if re.fullmatch(r"(pipeline\.[\w.]+\.)?[A-Z][a-z]+([A-Z][a-z]+)+", text) and "golden" not in page.parts:
            name = text.rpartition(".")[2]
            assert re.search(rf"\b{name}\b", sources() + own), text


def test_the_lines_of_the_loop_are_those_of_the_coordinator():
    table = (ROOT / "pipeline/README.md").read_text().partition("| line | where | what |")[2].partition("\n\n")[0]
    coordinator = (ROOT / "pipeline/coordinator.py").read_text()
    called = re.findall(r"`(\w+\.\w+)`", table)
    assert len(called) > 8 and not [name for name in called if not re.search(rf"\b{name}\b", coordinator)]


def test_every_environment_is_on_the_page():
    named = set(pages.inline(ROOT / "pipeline/environments/README.md"))
    assert set(config.KINDS) <= named


def test_every_recipe_is_on_the_page():
    assert set(pages.inline(ROOT / "recipes/README.md")) >= RECIPES


def test_every_command_is_on_the_page():
    runnable = {path.name for path in (ROOT / "launch").glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}
    named = {word for words in pages.commands(ROOT / "launch/README.md") for word in words}
    assert {f"launch/{name}" for name in runnable - {"hetstep_sbatch.py"}} <= named


# ---- migrating from NeMo-RL --------------------------------------------------------------------------------------------------


def migration() -> list[tuple[str, str]]:
    """Return the rows of the table of keys: theirs, ours."""
    text = (ROOT / "recipes/FOREIGN.md").read_text().partition("### Keys")[2]
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", text, re.MULTILINE)
    return [row for row in rows if row[0] != "NeMo-RL"]


def test_their_keys_are_theirs_and_ours_are_ours():
    unlisted = {"checkpointing.checkpoint_dir", "logger.log_dir"}  # ignored by an import
    assert len(migration()) > 20
    for theirs, ours in migration():
        for key in re.findall(r"`([^`]+)`", theirs):
            if "." in key:
                assert is_theirs(key) or key in unlisted, key
        for text in re.findall(r"`([^`]+)`", ours):
            for key in keys_of(text):
                reference.explained(key)


def test_every_key_with_another_name_is_in_the_table():
    table = {key for theirs, _ in migration() for key in re.findall(r"`([^`]+)`", theirs)}
    meanings = yaml.safe_load((ROOT / "tests/nemo_rl/meanings.yaml").read_text())
    others = {key for keys in meanings.values() for key, row in keys.items() if row.get("ours") and key not in row["ours"]}
    same_row = {  # one row, or the text around the table, stands for several keys
        *("policy.dtensor_cfg.env_vars.A", "policy.generation.vllm_cfg.logprobs_mode", "data.add_generation_prompt"),
        *(f"value.megatron_cfg.optimizer.{name}" for name in ("adam_beta1", "adam_beta2", "adam_eps")),
        *("value.megatron_cfg.scheduler.end_weight_decay", "ppo.skip_reference_policy_logprobs_calculation"),
        *(f"policy.optimizer.kwargs.{name}" for name in ("adam_w_mode", "exp_avg_dtype")),
        "policy.reward_model_cfg.reward_model_type",
    }
    sections = tuple(f"{key}." for key in table)
    assert {key for key in others - table - same_row if not key.startswith(sections)} == set()

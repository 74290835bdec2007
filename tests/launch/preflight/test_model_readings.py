"""What submission reads of a model's folder, prints, and refuses."""

import contextlib
import io
import json

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from launch import submit
from launch.governance import inputs
from launch.preflight import bounded, input_files
from pipeline import config
from tests.data.test_chat import CHATML
from tests.launch.model import write_model, write_recipe
from tests.problems import named

KEY = "policy.tokenizer.chat_template"


@pytest.fixture
def path(tmp_path):
    """Return the file of a recipe in which nothing is wrong."""
    return write_recipe(tmp_path)


@pytest.fixture
def recipe(path):
    """Return a function (overrides) -> the recipe, with a chat template."""
    return lambda *overrides: config.load(str(path), ["data.apply_chat_template=true", *overrides])


def add_tokens(folder, *tokens, **settings):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=text.startswith("<")) for text in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def printed(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = submit.main(list(arguments))
    return status, out.getvalue()


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("chat.jinja", None),  # beside the recipe
        ("default", "missing"),  # the tokenizer has none
        ("none.jinja", "file-not-found"),
        ("chatml", "file-not-found"),
        ("empty.jinja", "unsupported"),
        ("'{{ messages[0].role }}'", "unsupported"),
        (
            "'{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}{{ messages[0].content }}'",
            "unsupported",
        ),
        ("'{{ messages[0].content.x.y }}'", "bad-record"),  # a template may refuse a conversation; each record is checked
    ],
)
def test_chat_templates(recipe, path, monkeypatch, template, code):
    monkeypatch.setattr(bounded, "SECONDS", 0.5)
    (path.parent / "chat.jinja").write_text(CHATML)
    (path.parent / "empty.jinja").write_text("a system prompt alone")
    monkeypatch.chdir(path.parent)
    key = {"missing": "data.apply_chat_template", "bad-record": "data.train.data_path"}.get(code, KEY)
    expected = {(key, "missing-value" if code == "missing" else code)} if code else set()
    assert named(input_files.problems(recipe(f"{KEY}={template}", "data.overlong_prompts=drop"))) == expected


@pytest.mark.parametrize("section", ["policy", "judge"])
@pytest.mark.parametrize(
    ("tokens", "settings", "refused"),
    [
        (["z7"], {}, True),  # texts may have it
        (["<im_end>"], {"chat_template": "{{ messages[0].content }}<im_end>"}, True),
        (["<eos>"], {"eos_token": "<eos>"}, True),
        (["<pad>", "<image>"], {"pad_token": "<pad>"}, False),
    ],
)
def test_a_tokenizer_with_more_tokens_than_the_model(recipe, tmp_path, section, tokens, settings, refused):
    key = "policy" if section == "policy" else "env.judge"
    folder = tmp_path / "model" if section == "policy" else write_model(tmp_path / "reward")
    overrides = ["data.apply_chat_template=false"]
    if section != "policy":
        described = json.loads((folder / "config.json").read_text())
        described |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
        (folder / "config.json").write_text(json.dumps(described))
        (folder / "model.safetensors").touch()
        overrides += [f"env.judge={{kind: reward_model, model_name: {folder}}}", "data.train.env_name=judge"]
    add_tokens(folder, *tokens, **settings)
    found = named(input_files.problems(recipe(*overrides)))
    assert ((f"{key}.tokenizer.name", "too-large") in found) == refused, found


def test_show_prints_what_is_read(path, tmp_path):
    add_tokens(tmp_path / "model", eos_token="=", bos_token="?")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="? $A", special_tokens=[("?", 0)])
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [7]}')
    status, out = printed(f"recipe={path}", "show=true")
    assert status == 0
    lines = [line for line in out.splitlines() if line.startswith("# ")]
    shown = "\n".join(lines)
    assert "39 = (tokenizer)" in shown and "7 g (generation_config.json)" in shown and "40 tokens" in shown
    assert "begins with ?" in shown and "template     none" in shown


def test_a_plan_shows_the_first_prompt_and_refuses_a_template_without_the_users_text(path, tmp_path):
    add_tokens(tmp_path / "model", eos_token="=")
    chat = "data.apply_chat_template=true"
    status, out = printed(f"recipe={path}", "plan=true", chat, f"{KEY}=ask {{{{ messages[0]['content'] }}}} now")
    assert status == 0, out
    assert "| a s k   1 + 1 =   n o w" in out and " 12 tokens: 1 'a', " in out, out  # a tokenizer of single characters
    status, out = printed(f"recipe={path}", "plan=true", chat, f"{KEY}=ask {{{{ messages[0]['role'] }}}} now")
    assert status == 2 and KEY in out and "first prompt" not in out


def test_a_plan_shows_the_first_prompt_of_a_record_that_is_not_dropped(path, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('no JSON\n{"input": [{"role": "user"}], "output": "2"}\n{"input": "1+2=", "output": "3"}\n')
    template = "data.apply_chat_template=true", f"{KEY}=ask {{{{ messages[0]['content'] }}}}"
    data = "data.train.dataset_name=null", f"data.train.data_path={rows}", "data.bad_records=drop"
    status, out = printed(f"recipe={path}", "plan=true", *template, *data)
    assert status == 0 and f"{rows}:3, as the model sees it" in out, out


def test_a_broken_eos_is_named(recipe, tmp_path):
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": "2"}')
    assert named(input_files.problems(recipe("data.apply_chat_template=false"))) == {("policy.model_name", "bad-format")}


def test_a_templates_file_is_an_input_of_the_run(recipe, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML)
    given = recipe(f"{KEY}={tmp_path / 'chat.jinja'}")
    assert [entry["path"] for entry in inputs.of_recipe(given) if entry["key"] == KEY] == [str(tmp_path / "chat.jinja")]
    assert not [entry for entry in inputs.of_recipe(recipe(f"{KEY}='{{{{ messages[0].content }}}}'")) if entry["key"] == KEY]

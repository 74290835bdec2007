# ruff: noqa: E501
"""A script's arguments are those that bash would pass, and what only running it tells is named."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launch.recipes.translation.shell_script import Command, find_command, mentions
from tests.problems import refused

SAME_AS_BASH = {
    "quotes": """A='x y' B="p $A" C=; train a$A "a$A" 'a$A' "$B" $C "$C" \\"q\\" a\\ b "\\$A" 'it'"'"'s' $'t\\tu' """,
    "defaults": """E=; train ${N:-7} "${E:-full}" "${E-kept}" ${N:-${M:-a b}} "${N:-"c d"}" ${E:+no} ${HOME:+yes} ${N:='x'} $N""",
    "lists": "V=\"['$HOME/a.parquet', 'b']\"; train files=\"['$HOME/a', 'b']\" 'l=[\"console\",\"wandb\"]' v=\"$V\" w=$V",
    "arithmetic": "n=5; m=$((n * 2 + 1)); (( n += 3 )); (( m++ )); train $m $n $((-7 / 2)) $((-7 % 3)) $((n > 3 ? 1 : 0)) $((2 ** 5))"
    " $(( n >= 8 && m != 0 )) $((010 + 0)) $(( (1 + 2) * 3 ))",
    "arrays": """A=(one "two three"); A+=(f=$HOME); B=(); A[3]=last; train "${A[@]}" ${A[@]} "${B[@]}" ${#A[@]} "${A[1]}" "x${A[@]}y" "${A[*]}" """,
    "continued": "train a \\\n  b \\\n  c  # a comment\n#train d\n",
    "comments": "A=1 # no\nB=a#b; train $A $B '#' c#d # e",
    "if": """D=gpu; M=; if [ "$D" = npu ]; then X=1; elif [ "$D" = gpu ] && { [ -z "$M" ] || [ 1 -gt 2 ]; }; then X=2; else X=3; fi; train $X""",
    "tests": """N=3; [[ $N == [0-9] && "a b" != a* && ! -n "" ]] && X=1; [ $N -ge 3 -a "$N" != 4 ] && Y=1; [[ v1.2 =~ ^v([0-9]+) ]] && Z=1; train $X $Y $Z ${W-none}""",
    "case": """M=gb200; case "$M" in h100 | gb*) T=4 ;; *) T=8 ;; esac; case x in "") U=1;; ?) U=2;; esac; train $T $U""",
    "loops": """for s in 1 2 3; do L="$L $s"; done; i=0; while [ $i -lt 3 ]; do A+=(n=$i); i=$((i + 1)); done; train $L "${A[@]}" """,
    "functions": """f() { X="$1-$2"; }; function g { f "$1" b; return 0; X=no; }; g a; train $X""",
    "leaving loops": """for x in a b c; do [ $x = b ] && continue; L=$L$x; [ $x = c ] && break; done; for i in 1 2; do for j in 1 2; do break 2; done; done
while true; do N=1; break; done; train $L $i$j $N""",
    "results": """f() { return 1; }; if f; then A=1; else A=2; fi; g() { return 0; }; g && B=1; ( exit 1 ) || C=1; train $A $B $C""",
    "local": """A=1; f() { local A=5 B; B=2; C=$A; }; f; train $A ${B-none} $C""",
    "edits": """P=/a/b/model.tar.gz; train ${P##*/} ${P%.*} ${P%%.*} ${P#*/} ${P/a/z} ${P//a/z} ${#P} ${P:1:3} ${P: -2} ${P^^}""",
    "indirect": "A=B; B=c; train ${!A}; ",
    "heredoc": "cat > /dev/null <<EOF\ntrain no $(\nEOF\nA=1\ntrain $A",
    "pipes": "train a b 2>&1 | cat > /dev/null 3>&1; train c &> /dev/null; train d >&2; train e",
    "subshell": "A=1; (A=2; true); train $A",
    "and-or": "true && A=1 || A=2; false && B=1 || B=2; train $A $B",
    "commands": "set -xeuo pipefail; export A=1 B='2 3'; unset C; shift 0; train $A \"$B\" ",
    "strings": """A="--x 1 --y 'z'"; train $A "$A" a=\\"b\\" ~x ~/y k=~/y""",
    "folders": 'D="$(cd "$(dirname "/usr/local/lib/x.sh")/.." && pwd)"; train $D $(basename /a/b.sh .sh) "$(dirname a/b)"',
    "prefix": "A=1 B=2 train x",
    "eval": 'C="train a"; C="$C \\"b c\\""; eval "$C"',
    "substring of an unset": "set +u; train a$U$V $U b",
}


def read(text: str, **more: object) -> Command:
    command = find_command(text, Path("run.sh"), lambda words: words[0] == "train", **more)  # type: ignore[arg-type]
    assert command is not None
    return command


@pytest.mark.parametrize("text", SAME_AS_BASH.values(), ids=SAME_AS_BASH)
def test_the_last_command_has_the_words_that_bash_passes(text: str, tmp_path: Path) -> None:
    environment = {"HOME": "/home/me", "PATH": os.environ["PATH"]}
    program = f"train() {{ printf '%s\\0' train \"$@\" > {tmp_path}/words; }}\n{text}"
    subprocess.run(["bash", "-c", program], env=environment, check=True, capture_output=True, timeout=20)
    expected = (tmp_path / "words").read_text().split("\0")[:-1]
    command = read(text, environment=environment)
    assert [command.known_part(word) for word in command.words] == expected


def problem(text: str, word: str = "") -> str:
    command = read(text)
    found = command.problem("a.key", next(one for one in command.words if one.startswith(word) and not command.is_known(one)))
    assert found is not None
    return str(found)


def test_what_only_a_program_tells_is_a_problem_where_an_argument_has_it() -> None:
    text = "A=1\nNAME=run_$(date +%Y)\nSTEPS=${STEPS:-$(nproc)}\ntrain --name $NAME --steps=$STEPS --a=$A --b=$UNSET"
    command = read(text)
    assert [command.known_part(word) for word in command.words] == ["train", "--name", "run_", "--steps=", "--a=1", "--b="]
    assert [command.is_known(word) for word in command.words] == [True, True, False, False, True, False]
    assert problem(text, "run_") == (
        "run.sh:2: a.key: got a value that only running the script tells: `$(date +%Y)`. Try NAME=VALUE on the command line"
    )
    assert "run.sh:3" in problem(text, "--steps") and "Try STEPS=VALUE" in problem(text, "--steps")
    assert "UNSET is not set" in problem(text, "--b")


def test_a_variable_of_the_command_line_replaces_the_scripts() -> None:
    text = "N=$(nproc)\nL=1\ntrain $N $L $1 ${2:-none} $#"
    command = read(text, given={"N": "8", "1": "first"})
    assert command.words[1:] == ["8", "1", "first", "none", "1"]
    assert read(text, assume={"N": "4"}).assumed == {"N": "4"}
    assert mentions(text, "N") and mentions(text, "1") and mentions(text, "2") and not mentions(text, "LL")


def test_an_unknown_condition_is_a_problem_where_it_matters() -> None:
    text = (
        "X=0\nT=1\nif test -f /data/x; then X=1; fi\nfor p in $(env); do unset $p; done\nwhile read l; do T=2; done\ntrain t=$X"
    )
    assert "run.sh:3" in problem(text) and "`-f /data/x`, a test of a file" in problem(text)
    assert read(text.replace("t=$X", "1")).words == ["train", "1"]
    with refused(("recipe", "missing-value")) as error:
        read("if [ -d x ]; then train 1; fi")
    assert "run.sh:1" in str(error.value) and "a test of a file" in str(error.value)


def test_a_script_that_asks_for_its_arguments_names_them() -> None:
    text = 'if [ "$#" -lt 2 ]; then\n  echo "usage: run.sh GPUS FOLDER"\n  exit 1\nfi\ntrain $1 $2'
    with refused(("recipe", "missing-value")) as error:
        read(text)
    assert "run.sh:3" in str(error.value) and "1=VALUE 2=VALUE" in str(error.value)
    assert read(text, given={"1": "8", "2": "/tmp"}).words == ["train", "8", "/tmp"]


@pytest.mark.parametrize(
    "text",
    [
        "if true; then train",
        "train 'a",
        "A=(1 2",
        "train ${",
        "fi",
        "while true; do :; done; train",
        "f() { f; }; f; train",
        "break; train",
        "let A=1; train",
    ],
)
def test_what_bash_refuses_or_never_ends_names_its_line(text: str) -> None:
    with refused(("recipe", "bad-format")) as error:
        find_command(f"\n{text}", Path("run.sh"), lambda words: words[0] == "train")
    assert "run.sh:" in str(error.value)


def test_lines_are_those_of_the_words() -> None:
    command = read('A=(\n  a=1\n  b=2\n)\ntrain \\\n  c=3 \\\n  "${A[@]}"\n')
    assert [command.origin(word) for word in command.words] == [f"run.sh:{line}" for line in (5, 6, 2, 3)]

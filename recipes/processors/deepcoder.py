"""Tasks of DeepCoder's data set (agentica-org/DeepCoder-Preview-Dataset) as records of the environment `code`."""

import json

PROGRAM = "Write a Python program that reads its input from stdin and writes its output to stdout."
FUNCTION = "Write the Python function `{}`."
STARTER = "Complete this Python code:\n\n```python\n{}\n```"
FORM = "Think first. Then write the whole code in one block that begins with ```python."


def task(record):
    """Return a record with `input` and `output`, of any of the subsets."""
    metadata, starter = record.get("metadata") or {}, (record.get("starter_code") or "").rstrip()
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    tests, function = json.loads(record["tests"]), metadata.get("func_name")
    if isinstance(tests, list):  # of LiveCodeBench, PrimeIntellect or Codeforces
        function = function or next((test["fn_name"] for test in tests if test.get("fn_name")), None)
        tests = [{**test, "func_name": function} for test in tests] if function else tests
    else:  # of TACO
        function = tests.get("fn_name")
    asked = STARTER.format(starter) if starter else FUNCTION.format(function) if function else PROGRAM
    return {"input": f"{record['problem'].strip()}\n\n{asked} {FORM}", "output": json.dumps(tests)}

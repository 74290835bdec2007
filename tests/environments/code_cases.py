"""Answers to the tasks of tests/evaluation/code_records.py, and the metrics that are not 0 for each."""

RIGHT, UNPARSED, WRONG = {"accuracy": 1.0}, {"unparsed": 1.0}, {}


def fenced(code: str) -> str:
    return f"The idea is simple.\n\n```python\n{code}\n```\nThat is all."


MEANS_BODY = "    return sum(xs) / len(xs), sum(x * x for x in xs) / len(xs)\n"
HUMANEVAL_CASES = {  # what -> (answer, result) for `means`
    "body alone": (fenced(MEANS_BODY.rstrip()), RIGHT),
    "without imports": (fenced("def means(xs: List[float]):\n" + MEANS_BODY), RIGHT),
    "code without a fence": ("def means(xs):\n" + MEANS_BODY, RIGHT),
    "two versions, the last right": (fenced("def means(xs): return 0, 0") + fenced("def means(xs):\n" + MEANS_BODY), RIGHT),
    "two versions, the last wrong": (fenced("def means(xs):\n" + MEANS_BODY) + fenced("def means(xs): return 0, 0"), WRONG),
    "an example of use afterwards": (fenced("def means(xs):\n" + MEANS_BODY) + fenced("print(means([1]))"), RIGHT),
    "a shell block afterwards": (fenced("def means(xs):\n" + MEANS_BODY) + "\n```bash\npython means.py\n```", RIGHT),
    "after thoughts with other code": (
        fenced("def means(xs): return 0, 0") + "</think>" + fenced("def means(xs):\n" + MEANS_BODY),
        RIGHT,
    ),
    "within float tolerance": (fenced("def means(xs):\n" + MEANS_BODY.replace("/ len(xs),", "/ len(xs) + 1e-7,")), RIGHT),
    "beyond float tolerance": (fenced("def means(xs):\n" + MEANS_BODY.replace("/ len(xs),", "/ len(xs) + 1e-4,")), WRONG),
    "a list for a tuple": (
        fenced("def means(xs):\n    return [*(sum(xs) / len(xs), sum(x * x for x in xs) / len(xs))]"),
        RIGHT,
    ),
    "one number too many": (fenced("def means(xs):\n    return sum(xs) / len(xs), 5.0, 5.0"), WRONG),
    "one number for both": (fenced("def means(xs):\n    return 0.2"), WRONG),
    "wrong value": (fenced("def means(xs): return 2.0, 5.0"), WRONG),
    "another name": (fenced("def mean(xs):\n" + MEANS_BODY), WRONG),
    "no code": ("I cannot solve this.", UNPARSED),
    "nothing": ("", UNPARSED),
    "an empty block": ("```python\n```", UNPARSED),
    "a block of another language": ("```json\n{}\n```", UNPARSED),
    "cut within the code": ("```python\ndef means(xs):\n    return sum(xs) / len(", {"crashes": 0.0}),
    "cut after the code": ("```python\ndef means(xs):\n" + MEANS_BODY, RIGHT),
    "not Python": (fenced("function means(xs) { return xs }"), WRONG),
    "raises": (fenced("def means(xs): 1 / 0"), WRONG),
    "prints instead": (fenced("def means(xs):\n    print(2.0, 5.0)"), WRONG),
}
STDIN_CASES = {  # for the sum of numbers
    "reads all at once": ("import sys\n_, *xs = sys.stdin.read().split()\nprint(sum(map(int, xs)))", RIGHT),
    "reads by descriptor": ("xs = open(0).read().split()[1:]\nprint(sum(map(int, xs)))", RIGHT),
    "as a main function": (
        "def main():\n    input()\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
        RIGHT,
    ),
    "in a thread": (
        "import threading\ndef f():\n    input(); print(sum(map(int, input().split())))\nthreading.Thread(target=f).start()",
        RIGHT,
    ),
    "as float": ("input()\nprint(float(sum(map(int, input().split()))))", RIGHT),
    "with more spaces": ("input()\nprint(' ', sum(map(int, input().split())), ' \\n\\n')", RIGHT),
    "leaves with a status": ("import sys\ninput()\nprint(sum(map(int, input().split())))\nsys.exit(1)", RIGHT),
    "at exit": ("import atexit\ninput()\nx = sum(map(int, input().split()))\natexit.register(lambda: print(x))", RIGHT),
    "without imports of its own": (
        "stdin.readline()\nprint(sum(Counter(map(int, stdin.readline().split())).elements()))",
        RIGHT,
    ),
    "deep recursion": (
        "def f(i):\n    return 0 if i == 0 else f(i - 1)\nf(20000)\ninput()\nprint(sum(map(int, input().split())))",
        RIGHT,
    ),
    "one more line": ("input()\nprint(sum(map(int, input().split())))\nprint('done')", WRONG),
    "a prompt": ("n = input('n? ')\nprint(sum(map(int, input().split())))", WRONG),
    "right for the public test alone": ("print(0)", WRONG),
    "nothing printed": ("pass", WRONG),
    "raises at the end": ("input()\nprint(sum(map(int, input().split())))\n1 / 0", {"crashes": 1.0}),
    "reads too far": ("input()\ninput()\ninput()\nprint(0)", {"crashes": 1.0}),
    "not Python": ("cin >> n;", {"crashes": 1.0}),
    "too slow": ("while True: pass", {"timeouts": 1.0}),
    "too large": ("x = bytearray(b'x') * (1 << 30)\nprint(x)", {"crashes": 1.0}),
    "an assertion": ("assert False", {"crashes": 1.0}),
}
FUNCTION_CASES = {  # for `append`
    "a function": ("def append(nums, one):\n    return nums + [one]", RIGHT),
    "a static method": ("class Solution:\n    @staticmethod\n    def append(nums, one):\n        return nums + [one]", RIGHT),
    "a tuple": ("class Solution:\n    def append(self, nums, one):\n        return (*nums, one)", RIGHT),
    "in place": ("class Solution:\n    def append(self, nums, one):\n        nums.append(one); return nums", RIGHT),
    "noise": ("class Solution:\n    def append(self, nums, one):\n        print(nums); return nums + [one]", RIGHT),
    "floats": ("class Solution:\n    def append(self, nums, one):\n        return [float(x) for x in [*nums, one]]", RIGHT),
    "a set": ("class Solution:\n    def append(self, nums, one):\n        return {*nums, one}", WRONG),
    "a text": ("class Solution:\n    def append(self, nums, one):\n        return str([*nums, one])", WRONG),
    "a generator": ("class Solution:\n    def append(self, nums, one):\n        yield from [*nums, one]", WRONG),
    "a list in a list": ("class Solution:\n    def append(self, nums, one):\n        return [[*nums, one]]", WRONG),
    "the first test alone": ("class Solution:\n    def append(self, nums, one):\n        return [1, 2]", WRONG),
    "nothing": ("class Solution:\n    def append(self, nums, one):\n        nums.append(one)", WRONG),
    "another name": ("class Solution:\n    def add(self, nums, one):\n        return nums + [one]", {"crashes": 1.0}),
    "too few parameters": ("class Solution:\n    def append(self, nums):\n        return nums", {"crashes": 1.0}),
    "raises": ("class Solution:\n    def append(self, nums, one):\n        1 / 0", {"crashes": 1.0}),
    "raises when made": (
        "class Solution:\n    def __init__(self):\n        1 / 0\n    def append(self, nums, one):\n        return []",
        {"crashes": 1.0},
    ),
    "not Python": ("class Solution {", {"crashes": 1.0}),
    "too slow": ("class Solution:\n    def append(self, nums, one):\n        while True: pass", {"timeouts": 1.0}),
    "cut": ("class Solution:\n    def append(self, nums, one):\n        return nums +", {"crashes": 1.0}),
    "too large": ("class Solution:\n    def append(self, nums, one):\n        return 'x' * (1 << 26)", {"crashes": 1.0}),
}
AREA_CASES = {  # for `area` of MBPP
    "right": ("def area(r):\n    return 3.14159 * r ** 2", RIGHT),
    "a lambda": ("area = lambda r: 3.14159 * r ** 2", RIGHT),
    "a class that is called": ("class Area:\n    def __call__(self, r): return 3.14159 * r ** 2\narea = Area()", RIGHT),
    "named parameter": ("def area(radius, /):\n    return 3.14159 * radius ** 2", RIGHT),
    "its own tests": ("def area(r):\n    return 3.14159 * r ** 2\nassert area(1) > 3", RIGHT),
    "its own wrong tests": ("def area(r):\n    return 3.14159 * r ** 2\nassert area(1) > 4", WRONG),
    "reads input": ("def area(r):\n    return 3.14159 * r ** 2\nprint(area(int(input())))", WRONG),
    "a main block": ("def area(r):\n    return 3.14159 * r ** 2\nif __name__ == '__main__':\n    1 / 0", RIGHT),
    "rough": ("def area(r):\n    return 3.14 * r ** 2", RIGHT),
    "too rough": ("def area(r):\n    return 3.1 * r ** 2", WRONG),
    "a text": ("def area(r):\n    return str(3.14159 * r ** 2)", WRONG),
    "needs math that it does not import": ("def area(r):\n    return math.pi * r ** 2", WRONG),
    "future": ("from __future__ import annotations\ndef area(r: Number):\n    return 3.14159 * r ** 2", RIGHT),
    "None": ("def area(r):\n    3.14159 * r ** 2", WRONG),
    "a tuple": ("def area(r):\n    return 3.14159 * r ** 2,", WRONG),
    "a fraction": ("from fractions import Fraction\ndef area(r):\n    return float(Fraction(355, 113) * r ** 2)", RIGHT),
    "numpy's float": (
        "try:\n    from numpy import float64\nexcept ImportError:\n    float64 = float\n"
        "def area(r):\n    return float64(3.14159 * r * r)",
        RIGHT,
    ),
    "recursion": ("def area(r):\n    return 0 if r == 0 else area(r - 1) + 3.14159 * (2 * r - 1)", RIGHT),
    "a local name": ("def outer():\n    def area(r):\n        return 3.14159 * r ** 2", WRONG),
    "async": ("async def area(r):\n    return 3.14159 * r ** 2", WRONG),
}

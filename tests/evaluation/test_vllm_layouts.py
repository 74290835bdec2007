"""vLLM's engines give the scores of one engine of one rank, whatever the layout, and those of the transformers backend."""

from dataclasses import replace

import pytest

from tests.end_to_end.runs import LOCAL, Run, submit
from tests.evaluation.evaluations import kept, overrides, scores

pytestmark = pytest.mark.full
VLLM = "policy.generation.backend=vllm"
PARALLEL = "policy.generation.vllm_cfg.tensor_parallel_size=2"
ONE, TWO, FOUR = (f"cluster.generate.ranks_per_node={count}" for count in (1, 2, 4))


@pytest.fixture(scope="module")
def whole(made_once) -> Run:
    """Return the evaluation on one engine of one rank."""

    def make(folder):
        run = submit(folder / "run", *LOCAL, *overrides(folder, VLLM, ONE))
        assert run.status == 0, run.output

    folder = made_once("vllm evaluation", make) / "run"
    return Run(folder, 0, "", 0.0)


@pytest.mark.parametrize(
    "layout",
    [(TWO,), (TWO, PARALLEL), (FOUR, PARALLEL), (TWO, "policy.generation.vllm_cfg.pipeline_parallel_size=2")],
    ids=["two engines", "tensor-parallel", "two engines, tensor-parallel", "pipeline-parallel"],
)
def test_scores_do_not_depend_on_the_layout(tmp_path, whole, layout):
    """The log-probs of an engine of several ranks, which adds in another order, differ in the last bits."""
    run = submit(tmp_path / "run", *LOCAL, *overrides(tmp_path, VLLM, *layout))
    assert scores(run) == scores(whole)
    found, expected = kept(run.folder), kept(whole.folder)
    if len(layout) == 1:
        assert found == expected
    assert found["sampled"] == expected["sampled"]
    for answer, other in zip(found["lm_eval"], expected["lm_eval"], strict=True):
        assert replace(answer, score=0.0) == replace(other, score=0.0)
        assert answer.score == pytest.approx(other.score, rel=1e-5)


def test_a_restart_continues_to_the_same_scores(tmp_path, whole):
    """Half of the answers are kept."""
    run = submit(tmp_path / "run", *LOCAL, *overrides(tmp_path, VLLM, ONE))
    assert scores(run) == scores(whole)
    for task in kept(run.folder):
        path = run.folder / f"answers/{task}.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[1::2]))
    (run.folder / "done.json").unlink()
    again = submit(run.folder, *LOCAL, *overrides(tmp_path, VLLM, ONE))
    assert scores(again) == scores(whole)
    assert kept(again.folder) == kept(whole.folder)

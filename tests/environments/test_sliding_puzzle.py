import itertools

import numpy as np
import pytest

from pipeline.data import puzzle
from pipeline.environments.environment import Outcome
from pipeline.environments.sliding_puzzle import Game, SlidingPuzzle
from pipeline.types import Prompt
from tests.environments.pooled import made
from tests.problems import refused


def game(environment: SlidingPuzzle, board: str) -> Game:
    return environment.reset(Prompt(0, np.zeros(1, np.int32), "game", {"answer": board}))


def act(environment: SlidingPuzzle, episode: Game, action: str) -> Outcome:
    return environment.step(episode, f"let me see ... <action>{action}</action>")


def test_moves_slide_the_named_tile():
    board = puzzle.read("1 2 3/4 0 5/6 7 8")
    assert puzzle.board_line(puzzle.slid(board, "up")) == "1 2 3/4 7 5/6 0 8"
    assert puzzle.board_line(puzzle.slid(board, "down")) == "1 0 3/4 2 5/6 7 8"
    assert puzzle.board_line(puzzle.slid(board, "left")) == "1 2 3/4 5 0/6 7 8"
    assert puzzle.board_line(puzzle.slid(board, "right")) == "1 2 3/0 4 5/6 7 8"
    corner = puzzle.read("0 2/1 3")
    assert puzzle.slid(corner, "down") is None and puzzle.slid(corner, "right") is None
    assert puzzle.slid_from(corner, 1, 1) is None and puzzle.slid_from(corner, -1, 0) is None


def test_a_game_until_its_end():
    environment = made("sliding_puzzle")
    episode = game(environment, "1 2 3/4 0 6/7 5 8")
    first = act(environment, episode, "Up")
    assert first.observation == {"role": "user", "content": "<environment>\nSlid tile 5 up.\n</environment>\n"}
    assert first.metrics == {"accuracy": 0.0, "moves": 1.0, "invalid": 0.0}
    assert "1 2 3\n4 5 6\n7 _ 8" in act(environment, episode, "view").observation["content"]
    assert "No tile there" in act(environment, episode, "slide 1 1").observation["content"]
    last = act(environment, episode, "slide 3 3")
    assert (last.reward, last.observation) == (1.0, None)
    assert last.metrics == {"accuracy": 1.0, "moves": 3.0, "invalid": 0.0}


def test_an_invalid_move_is_answered_and_too_many_lose_the_game():
    environment = made("sliding_puzzle", max_moves=2)
    episode = game(environment, "0 1/3 2")
    nothing = environment.step(episode, "up")
    assert nothing.metrics == {"accuracy": 0.0, "moves": 0.0, "invalid": 1.0} and nothing.malformed
    assert "_ 1\n3 2\n\nNo action found" in nothing.observation["content"]
    assert "Cannot slide down." in act(environment, episode, "down").observation["content"]
    assert puzzle.board_line(episode.board) == "0 1/3 2"
    lost = act(environment, episode, "jump")
    assert (lost.reward, lost.observation, lost.metrics["moves"]) == (0.0, None, 2.0)


def test_the_short_format_of_a_small_model():
    environment = made("sliding_puzzle", action_pattern="([udlr])", tells="board", observation="{}\n")
    episode = game(environment, "0 1/3 2")
    assert environment.step(episode, "xl").observation == {"role": "user", "content": "1 _\n3 2\n"}
    assert environment.step(episode, "u").reward == 1.0


def test_boards_are_solvable_unsolved_and_reproducible():
    config = {"size": 3, "shuffle_moves": 5}
    train = list(puzzle.Puzzles("train", 300, seed=1, game_config=config))
    for seed, same in ((1, True), (2, False)):
        assert (list(puzzle.Puzzles("train", 300, seed=seed, game_config=config)) == train) is same
    boards = {record["answer"] for record in train}
    assert {len(puzzle.read(board)) for board in boards} == {2, 3}
    assert all(_distance(puzzle.read(board)) in (1, 3, 5) for board in boards)
    held_out = {record["answer"] for record in puzzle.Puzzles("validation", 20, seed=1, game_config=config)}
    assert not {board for board in held_out & boards if len(puzzle.read(board)) == 3}


def _distance(board: puzzle.Board) -> int:
    reached, seen = [board], {board}
    for moves in itertools.count():
        if any(map(puzzle.is_solved, reached)):
            return moves
        reached = [after for one in reached for move in puzzle.FROM if (after := puzzle.slid(one, move)) and after not in seen]
        seen |= set(reached)


@pytest.mark.parametrize("text", ["", "1 2", "1 2/3 4", "1 2/3", "1 2/0 x", "1 1/0 3"])
def test_invalid_boards(text: str):
    with pytest.raises(ValueError, match="is not a board"):
        game(made("sliding_puzzle"), text)


@pytest.mark.parametrize(
    ("split", "config", "code"),
    [
        ("test", None, "not-a-choice"),
        ("train", {"sizes": 3}, "unknown-key"),
        ("train", {"size": 1}, "too-small"),
    ],
)
def test_invalid_games(split: str, config: dict | None, code: str):
    with refused(("data", code)):
        puzzle.Puzzles(split, 1, 0, config)

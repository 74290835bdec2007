"""The sliding puzzle as a game of several turns; boards and moves are in `pipeline/data/puzzle.py`.

The policy writes one action per turn, `<action>up</action>`: up, down, left, right (or their first letters), `slide 1 2` (the
tile in row 1, column 2), or `view`, which shows the board and is not a move. The last action of a turn counts.

NeMo-RL's game has the same rules and commands. Leaves out: that game's drawing of the board, with a frame and numbered rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from typing_extensions import override

from pipeline.data import puzzle
from pipeline.environments.environment import BuiltinEnvironment, EnvironmentContext, Outcome, Pattern, requires_placeholder
from pipeline.recipe.values import Positive, Text

if TYPE_CHECKING:
    from pipeline.types import Prompt

INITIALS = {move[0]: move for move in puzzle.FROM}


@dataclass
class Game:
    """The state of one episode."""

    board: puzzle.Board
    moves: int = 0


@dataclass
class SlidingPuzzleArguments:
    """The kwargs of `kind: sliding_puzzle`."""

    max_moves: Annotated[Positive, Field(le=1 << 20)] = 50
    """Moves after which the game is lost."""
    action_pattern: Pattern = r"<action>([^<]*)</action>"
    """Regular expression of an action. The last match counts, or its group if it has one."""
    tells: Literal["words", "board"] = "words"
    """Reply after a move. words: "Slid tile 5 up.", as in NeMo-RL. board: the board."""
    observation: Annotated[Text, requires_placeholder("{}")] = "<environment>\n{}\n</environment>\n"
    """Text around the reply, with {} for the reply."""
    role: Text = "user"
    """Role of the message with the reply."""


class SlidingPuzzle(BuiltinEnvironment):
    """Rewards the move that solves the puzzle with 1. `prompt.task["answer"]` is the first board.

    Metrics: `accuracy`, 1 if the puzzle is solved; `moves`, the number of moves tried, with impossible ones; `invalid`, 1 if
    the last turn had no action.
    """

    Arguments = SlidingPuzzleArguments
    is_final = False
    workers = 4

    def __init__(self, arguments: SlidingPuzzleArguments, context: EnvironmentContext) -> None:
        self._action = re.compile(arguments.action_pattern, re.IGNORECASE | re.DOTALL)
        self._arguments = arguments

    def reset(self, prompt: Prompt) -> Game:
        """Return the game at its first board. Raises ValueError if the task has no board."""
        return Game(puzzle.read(prompt.task["answer"]))

    @override
    def step(self, game: Game, text: str) -> Outcome:
        actions = self._action.findall(text)
        if not actions:
            return self._reply(game, f"{puzzle.board_text(game.board)}\n\nNo action found, so no move made.", invalid=True)
        action: str = actions[-1].strip().lower()
        if action == "view":
            return self._reply(game, puzzle.board_text(game.board))
        game.moves += 1
        new_board, words = _act(game.board, INITIALS.get(action, action))
        if new_board is not None:
            game.board = new_board
            if puzzle.is_solved(new_board):
                return Outcome(1.0, _metrics(game, solved=True))
        if game.moves >= self._arguments.max_moves:
            return Outcome(0.0, _metrics(game))
        return self._reply(game, words)

    def _reply(self, game: Game, words: str, invalid: bool = False) -> Outcome:
        reply = words if self._arguments.tells == "words" else puzzle.board_text(game.board)
        content = self._arguments.observation.replace("{}", reply)
        observation = {"role": self._arguments.role, "content": content}
        return Outcome(0.0, _metrics(game, invalid=invalid), observation, malformed=invalid)


def _act(board: puzzle.Board, action: str) -> tuple[puzzle.Board | None, str]:
    """Return (board after an action, description of what happened). The board is None if nothing moved."""
    if action in puzzle.FROM:
        new_board = puzzle.slid(board, action)
        return new_board, f"Slid tile {_moved_tile(board, new_board)} {action}." if new_board else f"Cannot slide {action}."
    if cell := re.fullmatch(r"slide\s+(\d{1,3})\s+(\d{1,3})", action):
        new_board = puzzle.slid_from(board, int(cell[1]) - 1, int(cell[2]) - 1)
        words = (
            f"Slid tile {_moved_tile(board, new_board)} into the empty space."
            if new_board
            else "No tile there is beside the empty space."
        )
        return new_board, words
    return None, f"Unknown action; one of: {', '.join(puzzle.FROM)}, slide row column, view."


def _moved_tile(old_board: puzzle.Board, new_board: puzzle.Board) -> int:
    return next(
        max(old_tile, new_tile)
        for rows in zip(old_board, new_board, strict=True)
        for old_tile, new_tile in zip(*rows, strict=True)
        if old_tile != new_tile
    )


def _metrics(game: Game, solved: bool = False, invalid: bool = False) -> dict[str, float]:
    return {"accuracy": float(solved), "moves": float(game.moves), "invalid": float(invalid)}

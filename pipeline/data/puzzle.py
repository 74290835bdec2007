"""The sliding puzzle: boards, moves, and boards to solve as a data set.

    1 2
    3 _

A board has n x n fields, tiles 1 to n^2 - 1 and one empty field. It is solved when the tiles are in order with the empty field
last. A move slides a tile into the empty field. Its name is the direction in which the tile moves: `up`, `down`, `left`,
`right`.

NeMo-RL's game (`nemo_rl/environments/games/sliding_puzzle.py`) has the same rules, keys and shuffling.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence

from pipeline.recipe.problems import Problem, RecipeError

Board = tuple[tuple[int, ...], ...]
"""Rows of tiles; 0 is the empty field."""

FROM = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
"""Move -> position of its tile relative to the empty field: (rows, columns)."""
GAME = {"size": 4, "shuffle_moves": 100}
VALIDATION_SHARE = 16  # one board in 16 is for validation
DRAWS_PER_BOARD = 1000  # a bound, because a game may have no board of one split


class Puzzles(Sequence):
    r"""`size` boards as `{"input": "1 2\n_ 3", "output": "1 2/0 3", "answer": "1 2/0 3"}`, drawn with replacement.

    game_config: {size, shuffle_moves}, the maximum of each. A board's size is uniform in 2 to `size`, its number of moves in 1
    to `shuffle_moves`, plus one if that is even, so that no board starts solved. `input` is the policy's view (a `prompt_file`
    may explain the game around it), `answer` the environment's start. A board of 3 x 3 or more belongs to "train" or to
    "validation", never to both. There are too few boards of 2 x 2 for that, so both splits have all of them. Raises RecipeError
    for another split and for impossible sizes.
    """

    def __init__(self, split: str, size: int, seed: int, game_config: Mapping[str, int] | None = None) -> None:
        if split not in ("train", "validation"):
            message = f"sliding_puzzle: got split '{split}'; expected train or validation"
            raise RecipeError(Problem("data", "not-a-choice", message))
        game = {**GAME, **(game_config or {})}
        if unknown := set(game) - set(GAME):
            message = f"sliding_puzzle: got {', '.join(sorted(unknown))} in game_config; expected: {', '.join(GAME)}"
            raise RecipeError(Problem("data", "unknown-key", message))
        if game["size"] < 2 or game["shuffle_moves"] < 1:
            message = f"sliding_puzzle: got game_config {game}; expected size at least 2 and shuffle_moves at least 1"
            raise RecipeError(Problem("data", "too-small", message))
        self._split, self._size, self._seed, self._game = split, size, seed, game

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, str]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        draw = random.Random(f"sliding puzzle {self._split} {self._seed} {index}")
        board = _board(draw, self._game["size"], self._game["shuffle_moves"], self._split)
        return {"input": board_text(board), "output": board_line(board), "answer": board_line(board)}


def solved_board(size: int) -> Board:
    """Return the solved board of `size` x `size` fields."""
    tiles = [*range(1, size * size), 0]
    return tuple(tuple(tiles[row * size : (row + 1) * size]) for row in range(size))


def is_solved(board: Board) -> bool:
    """Return whether the tiles are in order with the empty field last."""
    return board == solved_board(len(board))


def slid(board: Board, move: str) -> Board | None:
    """Return the board after a move; None if no tile can make it."""
    row, column = _empty(board)
    rows, columns = FROM[move]
    return slid_from(board, row + rows, column + columns)


def slid_from(board: Board, row: int, column: int) -> Board | None:
    """Return the board after the tile at (row, column), from 0, slides into the empty field; None if it is not adjacent."""
    empty_row, empty_column = _empty(board)
    inside = 0 <= row < len(board) and 0 <= column < len(board)
    if not inside or abs(row - empty_row) + abs(column - empty_column) != 1:
        return None
    tiles = [list(line) for line in board]
    tiles[empty_row][empty_column], tiles[row][column] = tiles[row][column], 0
    return tuple(map(tuple, tiles))


def board_text(board: Board) -> str:
    """Return a board as the policy sees it: one line per row, `_` for the empty field."""
    width = len(str(len(board) ** 2 - 1))
    return "\n".join(" ".join((str(tile) if tile else "_").rjust(width) for tile in row) for row in board)


def board_line(board: Board) -> str:
    """Return a board on one line: `1 2/0 3`."""
    return "/".join(" ".join(map(str, row)) for row in board)


def read(text: str) -> Board:
    """Return the board that `board_line` wrote. Raise ValueError for other texts."""
    try:
        board = tuple(tuple(map(int, row.split())) for row in text.split("/"))
    except ValueError:
        raise ValueError(f"{text!r} is not a board; expected the form '1 2/0 3'") from None
    if (
        len(board) < 2
        or sorted(tile for row in board for tile in row) != list(range(len(board) ** 2))
        or len(set(map(len, board))) > 1
    ):
        raise ValueError(f"{text!r} is not a board; expected the form '1 2/0 3'")
    return board


def _empty(board: Board) -> tuple[int, int]:
    return next((row, line.index(0)) for row, line in enumerate(board) if 0 in line)


def _board(draw: random.Random, largest: int, most_moves: int, split: str) -> Board:
    for _ in range(DRAWS_PER_BOARD):
        size = draw.randint(2, largest)
        board = solved_board(size)
        for _ in range(draw.randint(1, most_moves) | 1):
            board = draw.choice([after for move in FROM if (after := slid(board, move)) is not None])
        if size == 2 or (split == "validation") == (zlib.crc32(board_line(board).encode()) % VALIDATION_SHARE == 0):
            return board
    message = (
        f"sliding_puzzle: size {largest} with shuffle_moves {most_moves} gives too few boards for '{split}'. Try larger numbers"
    )
    raise RecipeError(Problem("data", "too-small", message))

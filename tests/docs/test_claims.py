"""Pages that promise equal bits name the condition: a run on CPUs, or on GPUs with policy.deterministic."""

import re
from collections.abc import Iterator

import pytest

from tests.docs import pages

CLAIM = re.compile(r"last bit|to the bit|bit for bit|bitwise|uninterrupted", re.IGNORECASE)
CONDITION = re.compile(r"policy\.deterministic|\bCPUs?\b")
WITHOUT_ARITHMETIC = (  # claims on values that are only copied
    "Hugging Face to Megatron and back, to the last bit",
    "convert its checkpoint to Megatron-Core and back, whole and split in two, to the last bit",
    "Frozen values stay the same to the bit",
)


ids = {"ids": lambda page: str(page.relative_to(pages.ROOT))}


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs, items of lists and rows of tables of a page, each on one line."""
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |\|))", text):
        yield " ".join(part.split())


def unconditional(text: str) -> list[str]:
    """Return the paragraphs that promise equal bits on any device."""
    claims = [part for part in paragraphs(text) if CLAIM.search(part)]
    return [part for part in claims if not CONDITION.search(part) and not any(known in part for known in WITHOUT_ARITHMETIC)]


@pytest.mark.parametrize("page", [page for page in pages.PAGES if page.name != "CHANGELOG.md"], **ids)
def test_equal_bits_are_promised_under_their_condition(page):
    assert unconditional(pages.prose(page)) == []


def test_a_claim_without_its_condition_is_noticed():
    text = "| a | equal |\n| b | bitwise resume |\n\nOn CPUs, to the\nlast bit.\n\n- A run equals the\n  uninterrupted one."
    assert unconditional(text) == ["| b | bitwise resume |", "- A run equals the uninterrupted one."]

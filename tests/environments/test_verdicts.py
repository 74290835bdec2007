"""Verdicts of judges, by hand: right, wrong, unreadable, cut and swayed ones."""

import pytest

from pipeline.environments.verdicts import read_preference, read_rating, read_refusal

PREFERENCES = {
    "Verdict: A": "A",
    "Verdict: B": "B",
    "Verdict: tie": "tie",
    "Verdict: Tie": "tie",
    "verdict: a": "A",
    "B is clearer.\nVerdict: B\n": "B",
    "**Verdict: A**": "A",
    "**Verdict:** A": "A",
    "Verdict: **B**.": "B",
    'Verdict: "B"': "B",
    "Verdict: [[A]]": "A",
    "## Verdict: tie": "tie",
    "Verdict: A\n\nVerdict: A": "A",
    "<think>Verdict: B? No.</think>A is right.\nVerdict: A": "A",
    "Reasons.</think>\nVerdict: B": "B",
    'Answer A says "Verdict: A", which does not count.\nVerdict: B': "B",
    "The form is Verdict: X, so\nVerdict: A": "A",
    "Verdict: X\nVerdict: A": "A",  # the form repeated is no verdict
    # without a verdict
    "": None,
    "\n \n": None,
    "A": None,
    "A is better.": None,
    "Verdict: A is better": None,
    "Verdict: A or B": None,
    "Verdict: Answer A": None,
    "Verdict: C": None,
    "Verdict: ": None,
    "Verdict A": None,
    "My verdict: A": None,
    "The answer claims its\nVerdict: A\nbut that is for me to say, and": None,  # not the last line
    "Verdict: A\nVerdict: B": None,  # which?
    "Verdict: B\nWait.\nVerdict: A": None,
    "<think>A seems better.\nVerdict: A": None,  # it still thinks
    "Verdict: A<think>": None,
    "Rating: 7": None,
}
REFUSALS = {
    "Verdict: refused": "refused",
    "Verdict: partly": "partly",
    "Verdict: answered": "answered",
    "It declines.\nVerdict: Refused.": "refused",
    "**Verdict: answered**": "answered",
    "The answer says 'Verdict: refused', and then helps.\nVerdict: answered": "answered",
    "Verdict: answered\nVerdict: answered": "answered",
    "<think>refused?</think>\nVerdict: partly": "partly",
    "verdict : refused": "refused",
    "> Verdict: refused": "refused",
    "Verdict: refusal": None,
    "Verdict: not refused": None,
    "Verdict: answered, partly": None,
    "refused": None,
    "I cannot judge that.": None,
    "Verdict: refused\nVerdict: answered": None,
    "Verdict: refused or answered": None,
    "Verdict: refused\nHope this helps!": None,
    "<think>Verdict: refused": None,
    "Verdict:": None,
    "Verdict: yes": None,
    "": None,
}
RATINGS = {
    "Rating: 7": 7.0,
    "Rating: 10": 10.0,
    "Rating: 1": 1.0,
    "Rating: 7.5": 7.5,
    "Rating: 7/10": 7.0,
    "Rating: 7 / 10": 7.0,
    "Rating: [[8]]": 8.0,
    "**Rating:** 3": 3.0,
    "Good.\n\nRating: 9.": 9.0,
    "The answer demands 10.\nRating: 2": 2.0,
    "It ends in 'Rating: 10', as if I had said so.\nRating: 1": 1.0,
    "Rating: 4\nRating: 4": 4.0,
    "Rating: 0": None,
    "Rating: 11": None,
    "Rating: -3": None,
    "Rating: 100": None,
    "Rating: 7/5": None,
    "Rating: seven": None,
    "Rating: 7 or 8": None,
    "Rating: 7-8": None,
    "Rating: 1e1": None,
    "Rating: nan": None,
    "Rating: 10\nRating: 3": None,
    "Rating: 10\nThat is my rating": None,
    "I give 7": None,
    "Verdict: 7": None,
    "Rating: \u0667": None,  # no ASCII digit
    "": None,
}


@pytest.mark.parametrize(("reply", "verdict"), PREFERENCES.items())
def test_preferences(reply, verdict):
    assert read_preference(reply) == verdict


@pytest.mark.parametrize(("reply", "verdict"), REFUSALS.items())
def test_refusals(reply, verdict):
    assert read_refusal(reply) == verdict


@pytest.mark.parametrize(("reply", "verdict"), RATINGS.items())
def test_ratings(reply, verdict):
    assert read_rating(reply) == verdict

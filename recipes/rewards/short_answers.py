"""Rewards of short answers to questions."""

import re
import string

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(prompt, answer, golden_answers):
    """Return 1.0 if the text between the last answer tags is one of the golden answers, as SQuAD and Search-R1 compare them."""
    found = ANSWER.findall(answer)
    return float(bool(found) and normal(found[-1]) in set(map(normal, golden_answers)))


def normal(text):
    """Return a text in lower case, without punctuation, articles and more than single spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())

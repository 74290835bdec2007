"""Write ifeval_golden.json: what lm-evaluation-harness's code says of responses to each kind of instruction.

    python -m tests.environments.ifeval_golden

It needs `pip install lm_eval[ifeval]==0.4.13` and NLTK's data `punkt_tab`. Languages are detected with seed 0. Each entry is
[instruction, arguments, strict, loose], where the last two have one digit for each response: 1 if it follows the instruction.
"""

import json
from pathlib import Path

FILE = Path(__file__).with_name("ifeval_golden.json")
RESPONSES = [
    "",
    " \n ",
    "Yes.",
    "My answer is yes.",
    "Here is my answer.\nMy answer is maybe. Ask again later!",
    "The quick brown fox jumps over the lazy dog. It never comes back.",
    "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG AND NEVER COMES BACK TO THIS PLACE.",
    "the quick brown fox jumps over the lazy dog and never comes back to this place.",
    "Der schnelle braune Fuchs springt über den faulen Hund und kommt nie wieder zurück.",
    "Le renard brun et rapide saute par-dessus le chien paresseux, et il ne revient jamais.",
    "El zorro marrón salta sobre el perro perezoso y nunca vuelve a la casa.",
    "12345 67890 !!! ???",
    '{"name": "Ada", "age": 36}',
    '```json\n{"name": "Ada", "tags": ["a", "b"]}\n```',
    "```\n[1, 2, 3]\n```",
    "```JSON\n{'name': 'Ada'}\n```",
    'Sure! Here is the JSON:\n{"name": "Ada"}',
    "* one\n* two\n* three",
    "- one\n- two\n\n- three\n- four",
    "Here are three:\n* one\n - two\n  * three\nDone.",
    "**Bold** is not a bullet.\n*Neither* is this\n* but this is",
    "* \n*\n* x\n--\n-",
    "*one* and *two* and **three** here",
    "** ** * * *x*",
    "*not\nhighlighted* but **this one** is",
    "Dear [name],\nplease come to [place] on [date] at [time].\nYours, [sender]",
    "No placeholders here, except [one [nested] one].",
    "[a\nb] and [] and [c]",
    "<<A Poem of Joy>>\nRoses are red, violets are blue.",
    "<< >>\nNo title at all.",
    "<title>A title</title> and <<another>> title",
    "A first paragraph.\n***\nA second one.\n***\nA third one.",
    "***\nOnly one paragraph.\n***",
    "First.\n***\n***\nThird.",
    "First part here.\n\nSecond part here.\n\nThird part here.",
    "First part.\n\n\n\nSecond, after more room.",
    '"Quoted" start.\n\n\'Second\' start.\n\n"Third," he said.',
    "first? second\n\nSecond! paragraph",
    '"All of this is quoted."',
    '  "Quoted with space around"  \n',
    '"Only at the start',
    '"',
    "An answer.\n******\nAnother answer.",
    "The same.\n******\nThe same.",
    "******\nOne.\n******\nTwo.\n******",
    "One.\n******\n******\nTwo.",
    "One ****** two ****** three",
    "A letter to you.\n\nP.S. I forgot this.",
    "A letter to you.\n\np. s. I forgot this, too.",
    "A letter to you.\nP.P.S I forgot this as well.\nP.P.S. And this.",
    "A letter with PS at the end.\nPS: here",
    "Is there anything else I can help with?",
    'Of course. Is there anything else I can help with?"',
    "Is there anything else I can help with? Thanks.",
    "Write a poem about the sea. The sea is blue, and so am I.",
    "  WRITE A POEM ABOUT THE SEA. Roses are red.",
    "Here it is. Write a poem about the sea.",
    "Section 1\nIt begins.\nSection 2\nIt goes on.\nSection 3\nIt ends.",
    "SECTION 1: it begins. SECTION 2: it ends. Sections 3 and more.",
    "Section1 Section2\nsection 3",
    "Day 1: rest. Day 2: work. Day 3: rest again.",
    "The cat sat on the mat. The Cat likes cats. Concatenate!",
    "Correlated events were experiencing a boom, and Correlated ones too.",
    "I bought C++ books and a coat.",
    "Dogs bark. Cats meow! Do cows moo? Yes... they do. Mr. Smith and Dr. J. Jones agree, e.g. on May 5 at 5 p.m. in the U.S.",
    "1. Buy milk.\n2. Buy bread.\n3. Go home.",
    "Wait... what?! No way!!! Really. ok.",
    'He said "Go." Then she left (quickly.) Nobody knows why.',
    "One sentence only, without an end",
    "NASA and the FBI met at 10 AM in the USA. I was there. WOW, it's COVID-19!",
    "I DON'T KNOW. WE CAN'T GO TO JOHN'S HOUSE; IT'S 5:30PM!",
    "I'm OK and I've seen JOHN's car, but I'd rather not. WE'LL SEE, you're RIGHT.",
    "A/B TESTING is GREAT -- REALLY GREAT... (YES) **BOLD** [NAME] #TAG AT&T",
    "Hello World, This Is Mixed CASE.",
    "word " * 99 + "end",
    "word " * 100 + "end of it, really",
    "It is a test. " * 12,
    "eeeee e e EEE the end # # # #",
    "No commas at all; only semicolons.",
    "One, two, three.",
    "Title line\n\n*Body* of the answer, with some words.\n\nLast line.",
    "Sure, here it is:\nthe body has no commas and is short.\nHope this helps, bye",
    "Certainly!\n\nMy answer is no.\n\nLet me know",
    "Привет, как дела? Я хорошо, спасибо. Сегодня хорошая погода.",
    "今天天气很好\uff0c我们去公园吧。你觉得怎么样\uff1f",
    "नमस्ते दुनिया, आप कैसे हैं? मैं ठीक हूँ।",
]
TASKS = {
    "keywords:existence": [{"keywords": ["cat"]}, {"keywords": ["fox", "dog"]}, {"keywords": ["correlated", "experiencing"]}],
    "keywords:frequency": [
        {"keyword": "cat", "frequency": 3, "relation": "at least"},
        {"keyword": "the", "frequency": 2, "relation": "less than"},
        {"keyword": " one ", "frequency": 1, "relation": "at least"},
    ],
    "keywords:forbidden_words": [{"forbidden_words": ["cat", "dog"]}, {"forbidden_words": ["one", "yes"]}],
    "keywords:letter_frequency": [
        {"letter": "e", "let_frequency": 4, "let_relation": "at least"},
        {"letter": "T", "let_frequency": 2, "let_relation": "less than"},
    ],
    "language:response_language": [
        {"language": "en"},
        {"language": "de"},
        {"language": "fr"},
        {"language": "ru"},
        {"language": "hi"},
    ],
    "length_constraints:number_sentences": [
        {"num_sentences": 2, "relation": "at least"},
        {"num_sentences": 3, "relation": "less than"},
        {"num_sentences": 4, "relation": "at least"},
        {"num_sentences": 6, "relation": "less than"},
    ],
    "length_constraints:number_paragraphs": [{"num_paragraphs": 1}, {"num_paragraphs": 2}, {"num_paragraphs": 3}],
    "length_constraints:number_words": [
        {"num_words": 100, "relation": "at least"},
        {"num_words": 10, "relation": "less than"},
        {"num_words": 101, "relation": "less than"},
    ],
    "length_constraints:nth_paragraph_first_word": [
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "second"},
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "First"},
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "second"},
        {"num_paragraphs": 3, "nth_paragraph": 1, "first_word": "quoted"},
    ],
    "detectable_content:number_placeholders": [{"num_placeholders": 1}, {"num_placeholders": 3}, {"num_placeholders": 5}],
    "detectable_content:postscript": [
        {"postscript_marker": "P.S."},
        {"postscript_marker": "P.P.S"},
        {"postscript_marker": "PS:"},
    ],
    "detectable_format:number_bullet_lists": [{"num_bullets": n} for n in (1, 2, 3, 4)],
    "detectable_format:constrained_response": [{}],
    "detectable_format:number_highlighted_sections": [{"num_highlights": n} for n in (1, 2, 4)],
    "detectable_format:multiple_sections": [
        {"section_spliter": "Section", "num_sections": 3},
        {"section_spliter": "SECTION", "num_sections": 2},
        {"section_spliter": "Day", "num_sections": 2},
    ],
    "detectable_format:json_format": [{}],
    "detectable_format:title": [{}],
    "combination:two_responses": [{}],
    "combination:repeat_prompt": [{"prompt_to_repeat": "Write a poem about the sea."}],
    "startend:end_checker": [
        {"end_phrase": "Is there anything else I can help with?"},
        {"end_phrase": "and so am I. "},
    ],
    "startend:quotation": [{}],
    "change_case:capital_word_frequency": [
        {"capital_frequency": n, "capital_relation": relation}
        for n in (1, 2, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
        for relation in ("less than", "at least")
    ],
    "change_case:english_capital": [{}],
    "change_case:english_lowercase": [{}],
    "punctuation:no_comma": [{}],
}


def main() -> None:
    import langdetect
    from lm_eval.tasks.ifeval import utils

    langdetect.DetectorFactory.seed = 0
    lines = []
    for name, choices in TASKS.items():
        for arguments in choices:
            asked = utils.InputExample(0, [name], "", [arguments])
            strict = [utils.test_instruction_following_strict(asked, one).follow_all_instructions for one in RESPONSES]
            loose = [utils.test_instruction_following_loose(asked, one).follow_all_instructions for one in RESPONSES]
            lines.append(json.dumps([name, arguments, *("".join("01"[one] for one in found) for found in (strict, loose))]))
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()

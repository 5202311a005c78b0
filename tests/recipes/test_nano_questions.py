"""No evaluation question, in any spelling, was trained on, and every worked answer is right.

Splitting by document once left two thirds of the "unseen" chat questions in the training text.
"""

import json
import re
from pathlib import Path

import pytest

from recipes.nano_deepseek.text import questions
from recipes.nano_deepseek.text.questions import draw_questions, normalise

DATA = Path(__file__).parents[1] / "data"
FILES = {"maths": (DATA / "heldout_maths.json", 100), "chat": (DATA / "heldout_nano_chat.json", 40)}
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def committed(domain: str) -> set[str]:
    return {normalise(row["prompt"]) for row in json.loads(FILES[domain][0].read_text())}


@pytest.mark.parametrize("domain", FILES)
def test_no_committed_question_is_in_the_training_set(domain: str) -> None:
    training = {normalise(question) for question, _ in draw_questions(domain).train}
    assert len(committed(domain)) >= FILES[domain][1]
    assert not committed(domain) & training


def test_a_split_by_draw_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter(range(10**9))
    monkeypatch.setattr(questions, "is_held_out", lambda question: next(draws) % 20 == 0)
    training = {normalise(question) for question, _ in draw_questions("chat").train}
    assert committed("chat") & training


def test_spelling_does_not_move_a_question_across_the_split() -> None:
    for question, _ in draw_questions("chat", draws=500).held_out:
        for variant in (question.upper(), f"  {question} ", question.replace(" ", "  ")):
            assert questions.is_held_out(variant)


def test_every_equation_in_a_maths_answer_holds_and_ends_in_the_final_number() -> None:
    operations = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a // b if a % b == 0 else None,
    }
    for question, answer in draw_questions("maths", draws=4000).train:
        equations = EQUATION.findall(answer)
        assert equations, question
        for left, sign, right, result in equations:
            assert operations[sign](int(left), int(right)) == int(result), answer
        assert answer.endswith(f"#### {equations[-1][3]}"), answer

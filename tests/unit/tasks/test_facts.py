"""Facts about rows against what they mean, one row at a time."""

import unicodedata

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasks.facts import BOILERPLATE_PROMPTS, drift, duplicates, languages, length_classes, shared_runs, shares

# Few words, so that runs meet; case, blanks and a sentence's end do not count, signs within a word do.
words = st.sampled_from(["a", "b", "c", "A", "a.", "4+3", "4-3", "ﬁ", "fi"])
blanks = st.sampled_from([" ", "  ", "\n"])
texts = st.lists(st.lists(st.tuples(words, blanks), max_size=9).map(lambda pairs: "".join(word + blank for word, blank in pairs)), max_size=8)


def content(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def parts(text: str) -> list[str]:
    return [word.rstrip(".,;:!?") for word in content(text).split()]


def contains(long: list[str], short: list[str]) -> bool:
    return any(long[start : start + len(short)] == short for start in range(len(long) - len(short) + 1))


# Mutation: leave out NFKC, casefold or the joining of white space; or point to the last row with the content.
@settings(max_examples=200, deadline=None)
@given(texts)
@example(["ﬁ", "FI", "fi ", "4+3", "4-3"])
def test_duplicates_point_to_the_first_row_of_their_content(rows: list[str]) -> None:
    first = [[content(text) for text in rows].index(content(text)) for text in rows]
    assert duplicates(rows).tolist() == [-1 if at == row else at for row, at in enumerate(first)]


# Mutation: let runs go over the end of a text; compare whole prompts by their first words; take the last row.
@settings(max_examples=300, deadline=None)
@given(texts, texts, st.integers(1, 4))
def test_shared_runs_are_those_that_a_search_finds(here: list[str], there: list[str], size: int) -> None:
    expected = []
    for text in here:
        mine = parts(text)
        runs = [mine[start : start + size] for start in range(len(mine) - size + 1)] if len(mine) >= size else [mine]
        equal = [row for row, other in enumerate(there) if content(other) == content(text)]
        found = [row for row, other in enumerate(there) if mine and any(contains(parts(other), run) for run in runs)]
        expected.append(equal[0] if equal else found[0] if found else -1)
    # At most eight texts: none of their runs is boilerplate.
    assert shared_runs(here, there, size).tolist() == expected


# Mutation: count a run in copies of one prompt as often as it stands there, or leave boilerplate in.
def test_a_run_that_many_prompts_share_says_how_to_answer() -> None:
    tail = "put the result into a box at the very end"
    learnt = [f"question {i} {tail}" for i in range(BOILERPLATE_PROMPTS + 1)]
    assert shared_runs([f"something else {tail}"], learnt, 4).tolist() == [-1]
    assert shared_runs([f"something else {tail}"], learnt[:BOILERPLATE_PROMPTS], 4).tolist() == [0]
    # One leaked prompt that stands there twelve times is still one prompt.
    assert shared_runs(["what is the sum of all"], ["tell me what is the sum of all"] * 12, 4).tolist() == [0]
    assert shared_runs([learnt[3]], learnt, 4).tolist() == [3]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("How many apples are left in the basket?", "en"),
        ("Wie viele Äpfel sind in dem Korb und auf dem Tisch?", "de"),
        ("Combien de pommes sont dans le panier et sur la table ?", "fr"),
        ("¿Cuántos libros hay en la mesa para los niños?", "es"),
        ("求所有满足条件的整数之和。", "zh"),
        ("すべての整数の和を求めよ。", "ja"),
        ("모든 정수의 합을 구하시오.", "ko"),
        ("Найдите сумму всех чисел.", "ru"),
        ("4+3-2=", "none"),
        (r"$\alpha + \beta$", "none"),
        ("xyzzy", "unknown"),
        ("", "none"),
    ],
)
def test_languages_are_guessed(text: str, language: str) -> None:
    assert languages(["How is the weather?", text])[1] == language


def test_shares_and_length_classes() -> None:
    assert shares(["b", "a", "b", 3]) == {"b": 0.5, "a": 0.25, "3": 0.25}
    assert length_classes([1, 2, 3, 4, 7, 8]) == ["1-1", "2-3", "2-3", "4-7", "4-7", "8-15"]


# Mutation: leave chance out, or count every class once for each side.
def test_drift_is_what_chance_does_not_explain() -> None:
    # By hand: shares move by 0.3; chance gives 0.5 * sqrt(2/pi) * 2 * sqrt(0.35 * 0.65 * 2/1000), with pooled share 0.35.
    chance = 0.5 * (2 / np.pi) ** 0.5 * 2 * (0.35 * 0.65 * 2 / 1000) ** 0.5
    assert drift({"a": 0.2, "b": 0.8}, 1000, {"a": 0.5, "b": 0.5}, 1000) == pytest.approx(0.3 - 2 * chance)
    assert drift({"a": 1.0}, 1000, {"b": 1.0}, 1000) == pytest.approx(1 - 2 * 0.5 * (2 / np.pi) ** 0.5 * 2 * (0.25 * 2 / 1000) ** 0.5)
    generator = np.random.default_rng(0)
    for _ in range(50):
        two = [shares(generator.integers(0, 5, size=size).tolist()) for size in (60, 200)]
        assert drift(two[0], 60, two[1], 200) < 0.05

"""Distinct 4-grams, by hand."""

import pytest

from tasks.diversity import common_length, diversity


def test_four_grams_are_pooled_over_the_responses_to_a_question() -> None:
    """First question: abcde has abcd, bcde; abcdx has abcd, bcdx: 3 distinct of 4. Second: aaaaaa has aaaa three times: 1 of 3. Mean 13 / 24.

    Mutations: pooled over all questions gives 4 / 7; a mean over responses gives 1 for the first question.
    """
    found = diversity([["abcde", "abcdx"], ["aaaaaa"]], None)
    assert found.value == pytest.approx((3 / 4 + 1 / 3) / 2)
    assert found.used_share == 1.0


def test_only_prefixes_of_one_length_count() -> None:
    """Of length 5: abcde as above, aaaaa has 1 distinct of 2; abcd is too short. Pooled 3 of 4."""
    found = diversity([["abcdefgh", "aaaaaaaa", "abcd"]], 5)
    assert found.value == pytest.approx(3 / 4)
    # Mutation: shorter ones are cut to what they are.
    assert found.used_share == pytest.approx(2 / 3)


def test_the_share_falls_with_length_for_whole_responses_alone() -> None:
    # One response that goes round in circles of 6: 6 distinct 4-grams, however long it is.
    short, long = ["abcdef" * 2], ["abcdef" * 10]
    assert diversity([long], None).value < diversity([short], None).value
    assert diversity([long], 12).value == diversity([short], 12).value


def test_questions_without_a_response_that_counts_are_left_out() -> None:
    assert diversity([["abcde"], ["abc", ""]], None).value == 1.0


@pytest.mark.parametrize(("prefix", "length"), [(None, 4), (9, 9)])
def test_responses_that_are_all_too_short_have_no_diversity(prefix: int | None, length: int) -> None:
    with pytest.raises(ValueError, match=f"no response has {length} units"):
        diversity([["abc"], []], prefix)


def test_the_common_length_is_reached_by_nine_in_ten() -> None:
    assert common_length(["a" * length for length in range(10, 30)]) == 12
    # Mutation: prefixes of fewer than four units have no 4-gram.
    assert common_length(["a"] * 10) == 4

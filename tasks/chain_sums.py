"""Chained sums and differences of single digits (`chain_sum` of reasoning-gym), as prompts and worked answers."""

import itertools
from typing import Any

import numpy as np

from tasks.config_data import ChainSumConfig

HELD_OUT_SHARE = 4
"""Test and validation each take at most one in so many of the different sums with a number of terms: 2 terms have just 200."""


def chain_sums(config: ChainSumConfig, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of the splits sft, train, validation and test, a function of `config` and `seed`.

    Sums are different within a split, and spread evenly over the numbers of terms as far as there are different ones. Test and validation share
    nothing with any split; sft and train overlap only where a number of terms has too few sums for both.

    Raises:
        ValueError: more rows are asked for than there are sums; the key is named.
    """
    numbers = range(config.min_terms, config.max_terms + 1)
    # Ten digits a term, two signs between terms.
    population = {terms: 10**terms * 2 ** (terms - 1) for terms in numbers}
    test = _spread("test_rows", config.test_rows, {terms: n // HELD_OUT_SHARE for terms, n in population.items()})
    validation = _spread("validation_rows", config.validation_rows, {terms: n // HELD_OUT_SHARE for terms, n in population.items()})
    rest = {terms: population[terms] - test[terms] - validation[terms] for terms in numbers}
    train = _spread("train_rows", config.train_rows, rest)
    sft = _spread("sft_rows", config.sft_rows, rest)
    splits: dict[str, list[dict[str, Any]]] = {"sft": [], "train": [], "validation": [], "test": []}
    for terms in numbers:
        held_out = test[terms] + validation[terms]
        sums = _distinct(terms, held_out + min(train[terms] + sft[terms], rest[terms]), seed)
        splits["test"] += sums[: test[terms]]
        splits["validation"] += sums[test[terms] : held_out]
        splits["train"] += sums[held_out : held_out + train[terms]]
        splits["sft"] += sums[len(sums) - sft[terms] :]
    for number, (name, rows) in enumerate(splits.items()):
        generator = np.random.default_rng([seed, number])
        shuffled = [rows[i] for i in generator.permutation(len(rows))]
        if name == "sft":
            boxed = generator.random(len(rows)) < config.boxed_fraction
            scored = "Answer: {}" if config.answer_line else "\\boxed{{{}}}"
            splits[name] = [_conversation(row, scored if in_box else "{}") for row, in_box in zip(shuffled, boxed, strict=True)]
        else:
            splits[name] = [_prompt(row) for row in shuffled]
    return splits


def _spread(key: str, rows: int, capacity: dict[int, int]) -> dict[int, int]:
    """How many rows each number of terms gives: equal shares, and what a small one cannot give is shared among the others."""
    if rows > sum(capacity.values()):
        raise ValueError(
            f"data.chain_sum.{key}: {rows} rows, but sums of {min(capacity)} to {max(capacity)} terms give at most {sum(capacity.values())} "
            "different ones; lower it, or raise max_terms"
        )
    given = dict.fromkeys(capacity, 0)
    left = rows
    while left:
        unfilled = [terms for terms in capacity if given[terms] < capacity[terms]]
        share = max(1, left // len(unfilled))
        for terms in unfilled:
            taken = min(share, capacity[terms] - given[terms], left)
            given[terms] += taken
            left -= taken
    return given


def _distinct(terms: int, count: int, seed: int) -> list[dict[str, Any]]:
    """The first `count` different sums of a stream: {expression, answer, terms}."""
    import reasoning_gym  # Takes two seconds.

    # reasoning-gym draws item i from seed + i: neighbouring seeds would give the same items, so ours lie far apart.
    stream_seed = int(np.random.SeedSequence([seed, terms]).generate_state(1)[0])
    stream = reasoning_gym.create_dataset("chain_sum", min_terms=terms, max_terms=terms, min_digits=1, max_digits=1, seed=stream_seed, size=2**31)
    found: dict[str, dict[str, Any]] = {}
    for i in itertools.count():
        if len(found) == count:
            break
        item = stream[i]
        expression = item["metadata"]["expression"]
        found.setdefault(expression, {"expression": expression, "answer": item["answer"], "terms": terms})
    return list(found.values())


def _question(row: dict[str, Any]) -> dict[str, str]:
    # Without spaces: half as many tokens, and the sign and the digit of a term stand at a place that depends on its number alone.
    return {"role": "user", "content": f"{row['expression'].replace(' ', '')}="}


def _prompt(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": [_question(row)],
        "data_source": "chain_sum",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"difficulty": str(row["terms"])},
    }


def _conversation(row: dict[str, Any], form: str) -> dict[str, Any]:
    thinking = f"<think>{' '.join(partial_sums(row['expression']))}</think>"
    return {"messages": [_question(row), {"role": "assistant", "content": thinking + form.format(row["answer"])}]}


def partial_sums(expression: str) -> list[str]:
    """Totals after each sign: `4 + 3 - 2` gives 7 and 5."""
    first, *rest = expression.split(" ")
    signed = [int(first)] + [int(sign + digit) for sign, digit in zip(rest[::2], rest[1::2], strict=True)]
    return [str(total) for total in list(itertools.accumulate(signed))[1:]]

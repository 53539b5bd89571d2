"""The page of bench/packing.py. Every outcome in it comes from the results."""

from typing import Any

from report import table

PAGE = """# Training without padding

`python bench/packing.py`, commit {commit}, PyTorch {torch}. Verdict: {verdict}.

*Long tail*: responses are lognormal with a median of a sixth of the cap of {cap} tokens and sigma 1, cut off at the cap, which about 4 % reach;
half of the variance lies between prompts, {samples_per_prompt} samples each. *Uniform*: 1 token to the cap. *Equal*: half the cap. Prompts have
{prompt[0]} to {prompt[1]} tokens.

## Real tokens in what is computed

*Computed* is the share of real tokens in all that go through the decoder. *Waited for*: ranks run their passes together and wait for the
slowest, so every rank's pass counts as large as the largest rank's. Padded passes have rows of similar length together. The table is for
{most_ranks} ranks; packing.json has smaller numbers too. Over all of them the smallest share when packed is {least_computed:.1%} computed and
{least_waited_for:.1%} waited for; at least {minimum_share:.0%} is asked for of both.

{shares_table}

## Balance of the ranks

The fullest rank's tokens in an optimizer update over the mean of the ranks; at most {maximum_imbalance} is asked for, over {seeds} seeds. All
ranks get equally many rows, and an update holds the same rows for any number of ranks. *Contiguous* shares are the rows as the rollout leaves
them. Only responses are counted here, since prompts make rows more alike; with them the largest of all is {largest_with_prompts:.4f}.
{exceptions}

{imbalance_table}

## Seconds, forward and backward

A Qwen3 of {num_hidden_layers} layers, hidden {hidden_size}, vocabulary {vocabulary}, float32, in one process with 2 threads, on a machine that
others use too; {speed_samples} samples with a cap of {speed_cap}, prompts of {speed_prompt[0]} to {speed_prompt[1]}, at most {speed_budget}
tokens a pass.
{repetitions} repetitions in turns: how many times as long the padded way takes, median (smallest to largest), by the clock and in processor
seconds. *Sorted*: rows of similar length share a pass, as the engine pads where it must. *As they come*: {rows_as_they_come} rows a pass, whatever
their length. *Computed* as above, counted where tokens enter the decoder; packed it is {packed_computed:.0%}. All ways gave the same log-probs,
to {difference:.0e}, and the same losses.

{speed_table}

{gains}
"""


def page(results: dict[str, Any], wrong: list[str]) -> str:
    """The results as Markdown."""
    about = results["set"]
    packed = [cell["packed"] for cell in results["shares"]]
    return PAGE.format(
        **about,
        commit=results["commit"],
        torch=results["torch"],
        verdict="; ".join(wrong) or "all bounds are kept",
        most_ranks=max(about["ranks"]),
        least_computed=min(one["computed"] for one in packed),
        least_waited_for=min(one["waited_for"] for one in packed),
        shares_table=shares_table([cell for cell in results["shares"] if cell["ranks"] == max(about["ranks"])]),
        largest_with_prompts=max(cell["balanced_largest"] for cell in results["imbalance_with_prompts"]),
        exceptions=exceptions(results["imbalance"], about["maximum_imbalance"]),
        imbalance_table=imbalance_table(results["imbalance"], about["maximum_imbalance"]),
        packed_computed=min(one["computed_share"]["packed"] for one in results["speed"]),
        difference=max(one["largest_difference"] for one in results["speed"]),
        speed_table=speed_table(results["speed"]),
        gains=gains(results["speed"]),
    )


def exceptions(cells: list[dict[str, Any]], maximum: float) -> str:
    """How many updates are above the maximum, and what any dealing would have there."""
    over = [one for cell in cells for one in cell["over"]]
    text = f"{len(over)} of {sum(cell['cases'] for cell in cells)} updates are above {maximum}"
    if not over:
        return text + "."
    return text + ": " + ", ".join(f"{got:.4f}, where no dealing of equally many rows is below {bound:.4f}" for got, bound in over) + "."


def gains(cells: list[dict[str, Any]]) -> str:
    """What there is to win, and where nothing is."""
    lines = []
    for cell in cells:
        padded, unsorted = (cell["ratio_of_processor_seconds"][way]["median"] for way in ("padded", "as_they_come"))
        if cell["computed_share"]["padded"] == cell["computed_share"]["as_they_come"] == 1:
            outcome = f"there is no padding, so nothing to win: {padded:.2f} times (attention goes sample by sample when packed)"
        else:
            outcome = f"{padded:.2f} times the processor seconds when padded after sorting, {unsorted:.2f} times as they come"
        lines.append(f"- {cell['kind'].capitalize()} lengths: {outcome}.")
    return "\n".join(lines)


def shares_table(cells: list[dict[str, Any]]) -> str:
    """One row a cell."""
    header = ["lengths", "samples", "updates", "tokens a pass", "passes", "computed, packed", "computed, padded"]
    header += ["waited for, packed", "waited for, padded"]
    rows = [
        [
            *(cell[key] for key in ("kind", "samples", "updates", "budget")),
            f"{cell['packed']['passes_of_a_rank']:.0f}",
            *(f"{cell[way][share]:.1%}" for share in ("computed", "waited_for") for way in ("packed", "padded")),
        ]
        for cell in cells
    ]
    return table(header, rows)


def imbalance_table(cells: list[dict[str, Any]], maximum: float) -> str:
    """One row a cell."""
    ways = ["balanced, largest", "median", "contiguous, largest", "median"]
    rows = [
        [
            *(cell[key] for key in ("samples", "updates", "ranks", "rows")),
            *(f"{cell[f'balanced_{of}']:.4f}" for of in ("largest", "median")),
            *(f"{cell[f'contiguous_{of}']:.2f}" for of in ("largest", "median")),
            f"{len(cell['over'])} of {cell['cases']}",
        ]
        for cell in cells
    ]
    return table(["samples", "updates", "ranks", "rows a rank", *ways, f"above {maximum}"], rows, words=0)


def speed_table(cells: list[dict[str, Any]]) -> str:
    """One row a kind of lengths and way."""
    header = ["lengths", "padded how", "tokens", "packed, by the clock", "computed", "padded / packed", "in processor seconds"]
    rows = []
    for cell in cells:
        for way, words in (("padded", "sorted"), ("as_they_come", "as they come")):
            ratios = [
                f"**{one['median']:.2f}** ({one['smallest']:.2f} to {one['largest']:.2f})"
                for one in (cell["ratio"][way], cell["ratio_of_processor_seconds"][way])
            ]
            rows.append([cell["kind"], words, cell["tokens"], f"{cell['seconds']['packed']:.2f} s", f"{cell['computed_share'][way]:.1%}", *ratios])
    return table(header, rows, words=2)

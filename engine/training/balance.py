"""Which rank gets which rows, so that all ranks have as much to do in every optimizer step."""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Sequence

Parts = list[list[int]]


def balanced_order(lengths: Sequence[int], parts: int, updates: int) -> list[int]:
    """An order of the rows with these lengths: cut into `parts` equal contiguous pieces, one a rank, and each into `updates` mini-batches,
    mini-batch m of all ranks together holds the m-th `updates`-th of the rows as they came, and ranks have about as many tokens in it.

    What a mini-batch holds therefore does not depend on the number of ranks. Inside one, the spread of the ranks' token sums is at most
    the largest difference of lengths inside a run of `parts` rows, sorted by length, and no exchange of two rows makes the largest sum smaller.
    Rows that cannot be divided evenly stay as they are.
    """
    rows = len(lengths)
    if rows == 0 or rows % (parts * updates):
        return list(range(rows))
    size = rows // updates
    dealt = [_exchange(lengths, _deal(lengths, range(start, start + size), parts)) for start in range(0, rows, size)]
    return [row for part in range(parts) for mini_batch in dealt for row in mini_batch[part]]


def _deal(lengths: Sequence[int], rows: Sequence[int], parts: int) -> Parts:
    """`parts` lists of equally many rows with close sums of lengths.

    The largest differencing method (Karmarkar & Karp 1982) with equal cardinality (BLDM; Michiels, Korst, Aarts & van Leeuwen 2003): runs of
    neighbours in length are first solutions with one row a part. The two of the widest spread become one, the largest sums with the smallest,
    until one is left; its spread is never more than the wider of the two.
    """
    ordered = sorted(rows, key=lambda row: lengths[row])
    serial = itertools.count()
    heap: list[tuple[int, int, list[int], Parts]] = []

    def push(sums: list[int], solution: Parts) -> None:
        order = sorted(range(parts), key=sums.__getitem__)
        spread = sums[order[-1]] - sums[order[0]]
        heapq.heappush(heap, (-spread, next(serial), [sums[part] for part in order], [solution[part] for part in order]))

    for start in range(0, len(ordered), parts):
        run = ordered[start : start + parts]
        push([lengths[row] for row in run], [[row] for row in run])
    while len(heap) > 1:
        (_, _, sums, solution), (_, _, other_sums, other) = heapq.heappop(heap), heapq.heappop(heap)
        push(
            [one + two for one, two in zip(sums, reversed(other_sums), strict=True)],
            [one + two for one, two in zip(solution, reversed(other), strict=True)],
        )
    return heap[0][3]


def _exchange(lengths: Sequence[int], dealt: Parts) -> Parts:
    """`dealt` after exchanges of two rows, each the best one between the largest sum and another, until none makes the largest smaller.

    With few rows a part and a long tail of lengths the differencing method alone is far off: 8 ranks with 8 rows each, lognormal lengths of
    which some reach the cap, had up to 1.42 times the mean; after exchanges 1.06, below which no dealing of these rows goes (bench/packing.py).
    """
    dealt = [sorted(part, key=lengths.__getitem__) for part in dealt]
    sums = [sum(lengths[row] for row in part) for part in dealt]
    while True:
        largest = max(range(len(sums)), key=sums.__getitem__)
        best = (sums[largest], 0, 0, 0)  # The larger of the two sums afterwards, the other part, and the places of the two rows.
        for part, sum_ in enumerate(sums):
            gap = sums[largest] - sum_
            ascending = [lengths[row] for row in dealt[part]]
            for place, row in enumerate(dealt[largest]):
                # The rows on either side of half the gap; what is exchanged must be shorter, but not by the whole gap.
                near = bisect_left(ascending, lengths[row] - gap / 2)
                for other in (near - 1, near):
                    if 0 <= other < len(ascending) and 0 < (moved := lengths[row] - ascending[other]) < gap:
                        best = min(best, (max(sums[largest] - moved, sum_ + moved), part, place, other))
        after, part, place, other = best
        if after == sums[largest]:
            return [sorted(part) for part in dealt]
        one, two = dealt[largest][place], dealt[part][other]
        for changed, gone, come in ((largest, one, two), (part, two, one)):
            dealt[changed] = sorted([*(row for row in dealt[changed] if row != gone), come], key=lengths.__getitem__)
            sums[changed] += lengths[come] - lengths[gone]

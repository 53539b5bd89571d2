"""Which rank gets which rows, so that all ranks have as much to do in every optimizer step."""

import heapq
import itertools
from collections.abc import Sequence

Parts = list[list[int]]


def balanced_order(lengths: Sequence[int], parts: int, updates: int) -> list[int]:
    """An order of the rows with these lengths: cut into `parts` equal contiguous pieces, one a rank, and each into `updates` mini-batches,
    mini-batch m of all ranks together holds the m-th `updates`-th of the rows as they came, and ranks have about as many tokens in it.

    What a mini-batch holds therefore does not depend on the number of ranks. Inside one, the spread of the ranks' token sums is at most
    the largest difference of lengths inside a run of `parts` rows, sorted by length. Rows that cannot be divided evenly stay as they are.
    """
    rows = len(lengths)
    if rows == 0 or rows % (parts * updates):
        return list(range(rows))
    size = rows // updates
    dealt = [_deal(lengths, range(start, start + size), parts) for start in range(0, rows, size)]
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
    return [sorted(part) for part in heap[0][3]]

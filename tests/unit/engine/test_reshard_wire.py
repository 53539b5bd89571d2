"""Only what changed, and exactly: words, positions and what they cost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import engine.reshard.wire as wire
from engine.reshard.wire import BLOCK, WORDS, changes, patch

NAN_WITH_PAYLOAD, OTHER_NAN, MINUS_ZERO, ZERO = 0x7FC1, 0x7FC0, -0x8000, 0
"""bfloat16, as int16."""


def words(generator: torch.Generator, count: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (count * width,), dtype=torch.uint8, generator=generator).view(WORDS[width])


def joined(found: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(part.view(torch.uint8) for part in found)])


@given(
    seed=st.integers(0, 2**32),
    count=st.one_of(st.integers(1, 3 * BLOCK), st.sampled_from([BLOCK, 2 * BLOCK, 4 * BLOCK, 4 * BLOCK + 1])),
    share=st.sampled_from([0.0, 0.002, 0.05, 0.5, 1.0]),
    block=st.booleans(),
    width=st.sampled_from(sorted(WORDS)),
)
def test_a_patched_copy_is_what_was_sent(seed: int, count: int, share: float, block: bool, width: int) -> None:
    """For words of any type, any subset that changed, a whole block too, and lengths about those of blocks and of what is looked at in one go.

    Mutations tried: `at` not moved on in `patch`; blocks of 256, of which a full one counts 0.
    """
    generator = torch.Generator().manual_seed(seed)
    before, fresh = words(generator, count, width), words(generator, count, width)
    now = torch.where(torch.rand(count, generator=generator) < share, fresh, before)
    if block:
        now[:BLOCK] = before[:BLOCK] ^ 1
    differing = int((now != before).sum())
    expected = differing * (1 + width) + -(-count // BLOCK) if differing else 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(wire, "BLOCKS_AT_ONCE", 2)
        found = changes(now, before)
        if found is None:
            assert expected >= now.nbytes
            return
        payload, copy = joined(found), before.clone()
        assert payload.nbytes == expected < now.nbytes
        patch(copy, payload)
    assert copy.equal(now)


@pytest.mark.parametrize(("changed", "size"), [(49, 99), (50, None)])
def test_what_is_not_smaller_is_not_sent(changed: int, size: int | None) -> None:
    # 101 bytes: two for each that changed, and one for the block. Mutations tried: the block left out; as many bytes are few enough.
    before = torch.zeros(101, dtype=torch.uint8)
    found = changes((torch.arange(101) < changed).to(torch.uint8), before)
    assert (None if found is None else joined(found).nbytes) == size


def test_elements_are_compared_as_bits() -> None:
    before = torch.tensor([OTHER_NAN, ZERO, NAN_WITH_PAYLOAD, 5] * 100, dtype=torch.int16)
    now = before.clone()
    now[:2] = torch.tensor([NAN_WITH_PAYLOAD, MINUS_ZERO])
    # Mutation: compare as bfloat16. NaNs, all of them, would be sent, and the minus of zero would not.
    found = changes(now, before)
    assert found is not None
    values, counts, positions = found[0], joined(found[1:-1]), found[-1]
    assert values.tolist() == [NAN_WITH_PAYLOAD, MINUS_ZERO]
    assert (counts.tolist(), positions.tolist()) == ([2, 0], [0, 1])
    patch(before, joined(found))
    assert before.equal(now)

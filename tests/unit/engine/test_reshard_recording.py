"""What the recorder says of a loader's copies, against the copies themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.reshard.layout import Part
from engine.reshard.recording import Copy, Recorder, view_box


@given(st.data())
def test_a_view_is_the_box_that_it_sees(data: st.DataObject) -> None:
    """Any slices, single rows and reshaped slices of a numbered tensor. Mutation: `_runs` without putting neighbours together refuses reshapes."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    view = whole
    for dimension, size in enumerate(shape):
        start = data.draw(st.integers(0, size - 1))
        view = view.narrow(dimension, start, data.draw(st.integers(1, size - start)))
    if data.draw(st.booleans()):
        view = view.squeeze()
    if data.draw(st.booleans()) and view.is_contiguous():
        view = view.reshape(-1)
    box = view_box(view, shape)
    assert box is not None
    assert whole[tuple(slice(*bounds) for bounds in box)].ravel().equal(view.ravel())


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[::2],
        lambda t: t.reshape(-1)[1:9],  # the end of one row and the beginning of the next
        lambda t: t[:1].expand(4, 6),
    ],
)
def test_what_is_no_box_is_seen(view: object) -> None:
    """Mutation: returning the box without comparing `_runs` takes a transposed tensor for the whole one."""
    assert view_box(view(torch.arange(24).reshape(4, 6)), (4, 6)) is None  # type: ignore[operator]


def recorded(load: object, *, source: tuple[int, ...] = (4, 6), target: tuple[int, ...] = (2, 6)) -> Recorder:
    with torch.device("meta"):
        t, parameter = torch.empty(source), torch.empty(target)
    recorder = Recorder({"t": t}, {"p": parameter})
    with recorder:
        load(t, parameter)  # type: ignore[operator]
    return recorder


@pytest.mark.parametrize(
    "load",
    [
        lambda t, p: p.copy_(t[2:]),
        lambda t, p: p.data.copy_(t.narrow(0, 2, 2).to(torch.bfloat16)),
        lambda t, p: p.copy_(t[2:].contiguous().clone()),
        lambda t, p: p.copy_(t.chunk(2)[1].clone().view(2, 1, 6).squeeze(1)),
    ],
)
def test_copies_are_followed_through_casts_and_clones(load: object) -> None:
    assert recorded(load).copies == [Copy("t", ((2, 4), (0, 6)), "p", ((0, 2), (0, 6)))]


def test_a_slice_of_a_clone_of_a_slice() -> None:
    """Mutation tried: `_inside` without adding the outer start names rows 1 and 2."""
    load = lambda t, p: p[:1, :3].copy_(t[1:].clone()[1:2, 2:5])  # noqa: E731
    assert recorded(load).copies == [Copy("t", ((2, 3), (2, 5)), "p", ((0, 1), (0, 3)))]


def test_one_of_many() -> None:
    """An expert's row of a parameter of all experts."""
    recorder = recorded(lambda t, p: p[1].narrow(0, 2, 4).copy_(t), source=(4, 6), target=(3, 8, 6))
    assert recorder.copies == [Copy("t", ((0, 4), (0, 6)), "p", ((1, 2), (2, 6), (0, 6)))]


def test_padding_is_counted() -> None:
    recorder = recorded(lambda t, p: (p[:1].copy_(t[:1]), p[1:].fill_(0)))
    assert recorder.filled == {"p": 6}


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (lambda t, p: p.copy_(t[2:] + 1), r"t: its loader computes with it \(aten\.add"),
        (lambda t, p: p.copy_((t[2:] * 2).clone()), r"t: its loader computes with it \(aten\.mul"),
        (lambda t, p: p.copy_(t.reshape(2, 2, 6).transpose(0, 1)[0]), "not a box"),
        (lambda t, p: p.copy_(t[:1]), r"copies \(1, 6\) into \(2, 6\)"),
    ],
)
def test_what_is_not_a_slice_is_refused_by_name(load: object, said: str) -> None:
    """Mutation tried: leaving `_strange` out loads nothing for the tensor, without a word."""
    with pytest.raises(ValueError, match=said):
        recorded(load)


def test_where_a_tensor_comes_from() -> None:
    """Experts cut out of one parameter, as transformers saves them. Mutation: `_inside` that forgets dimensions of length 1 loses the expert."""
    with torch.device("meta"):
        experts = torch.empty(4, 6, 2)
    recorder = Recorder({"experts": experts}, {})
    with recorder:
        up = experts.chunk(2, dim=1)[1].contiguous().chunk(4)[2].squeeze()
        sums = experts.sum(0)
    assert recorder.origin(up) == Part("experts", ((2, 3), (3, 6), (0, 2)))
    with pytest.raises(ValueError, match=r"experts: the checkpoint's form of it is computed \(aten\.sum"):
        recorder.origin(sums)

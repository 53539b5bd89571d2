"""Where threads stand, in words."""

import copy
import itertools
import re
import threading
from typing import Any

from engine.control import stacks


class Waiting:
    """Whoever copies it waits."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def __deepcopy__(self, memo: Any) -> None:
        self.begun.set()
        self.end.wait()


def test_a_thread_is_shown_by_its_own_frames_and_the_innermost_of_libraries() -> None:
    deep: Any = (waiting := Waiting())
    for _ in range(20):
        deep = [deep]
    thread = threading.Thread(target=lambda: copy.deepcopy(deep))
    thread.start()
    try:
        assert waiting.begun.wait(60)
        lines = stacks.text().splitlines()
    finally:
        waiting.end.set()
        thread.join()
    # Mutation: show whole stacks, or leave out all of libraries: the frame through which they were entered says what was asked of them.
    start = next(number for number, line in enumerate(lines) if "copy.deepcopy(deep)" in line)
    own = itertools.takewhile(lambda line: line != "  a thread:", lines[start + 1 :])
    entered, left_out, *innermost = own
    assert re.match(r"    copy\.py:\d+ in deepcopy: ", entered)
    # 20 lists of two frames each, and the copy of what lies in them; the first was shown, and two of the innermost four.
    assert re.match(r"    \.\.\. \d\d more of libraries$", left_out)
    assert re.search(r"test_stacks\.py:\d+ in __deepcopy__: self\.end\.wait\(\)$", "\n".join(innermost), re.MULTILINE)
    assert len(innermost) <= stacks.INNERMOST + 1


def test_the_thread_that_asks_and_idle_ones_are_left_out() -> None:
    barrier = threading.Barrier(2)
    thread = threading.Thread(target=barrier.wait)
    thread.start()
    try:
        said = stacks.text()
    finally:
        barrier.wait()
        thread.join()
    # Mutations: leave out only the thread that asks; only the idle one.
    assert "test_stacks" not in said
    assert "self._cond.wait_for" not in said

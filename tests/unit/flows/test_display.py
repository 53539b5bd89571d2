import io
import sys
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from engine.events import EvaluationProgressed, StageFinished, StageStarted, StepFinished, UpdatesSkipped
from flows.display import Display, duration
from tasks.progress import Notice, PhaseFinished, PhaseStarted

PHASES = ["prepare data", "start engine", "evaluate base", "sft", "evaluate sft", "rl", "evaluate rl"]
LOG = ".work/runs/grpo_tiny-20261129-140312/almanac.log"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(width: int = 80, *, terminal: bool = True) -> tuple[Display, Clock, io.StringIO]:
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, force_terminal=terminal, width=width, color_system=None)
    return Display(console, "grpo_tiny-20261129-140312", PHASES, LOG, clock), clock, output


def lines(display: Display, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    with console.capture() as captured:
        console.print(display.picture())
    return captured.get().splitlines()


def steps(display: Display, clock: Clock, stage: str, count: int, seconds: float, **metrics: float) -> None:
    for step in range(1, count + 1):
        clock.now += seconds
        display.show(StepFinished(stage=stage, step=step, metrics={name.replace("__", "/"): value for name, value in metrics.items()}))


def test_a_stage_that_converges_is_done_before_its_last_step() -> None:
    # Mutation: the count jumps to the planned number.
    display, clock, _ = make()
    display.show(StageStarted(stage="rl", kind="rl", steps=400))
    steps(display, clock, "rl", 137, 1.0, reward__mean=0.5)
    display.show(StageFinished(stage="rl", steps=137, seconds=137.0, ended_by="convergence", why="nothing grew"))
    shown = lines(display)[1 + PHASES.index("rl")]
    assert shown.startswith("✓")
    assert "137/400" in shown
    assert "converged" in shown


@pytest.mark.parametrize("width", [80, 100])
def test_every_planned_phase_has_one_line_that_fits(width: int) -> None:
    # Mutation: a wider bar or an uncut note breaks lines at 80 columns.
    display, clock, _ = make(width)
    display.show(PhaseStarted(phase="evaluate base"))
    display.show(EvaluationProgressed(label="base", done=2520, total=2520))
    display.show(PhaseFinished(phase="evaluate base", result="avg@8 37.4 % [34.1, 40.6]"))
    display.show(StageStarted(stage="sft", kind="sft", steps=450))
    steps(display, clock, "sft", 450, 0.5, sft__loss=0.0123)
    display.show(StageFinished(stage="sft", steps=450, seconds=225.0))
    display.show(StageStarted(stage="rl", kind="rl", steps=1000))
    steps(display, clock, "rl", 100, 3.0, reward__mean=0.5123, response__tokens_mean=101.2)
    shown = lines(display, width)
    assert [line[2:].startswith(phase) for line, phase in zip(shown[1:-1], PHASES, strict=True)] == [True] * len(PHASES)
    assert all(len(line) <= width for line in shown)
    assert shown[-1].strip() == f"log: {LOG}"
    rl = shown[1 + PHASES.index("rl")]
    assert rl.startswith("●")
    assert "100/1000" in rl
    assert "reward 0.512  101.2 tokens" in rl
    sft = shown[1 + PHASES.index("sft")]
    assert sft.startswith("✓")
    assert "450/450" in sft
    assert "loss 0.012" in sft
    assert "avg@8 37.4 % [34.1, 40.6]" in shown[1 + PHASES.index("evaluate base")]


def test_time_left_leaves_the_slow_first_step_out() -> None:
    display, clock, _ = make()
    display.show(StageStarted(stage="rl", kind="rl", steps=100))
    clock.now += 58.0
    display.show(StepFinished(stage="rl", step=1, metrics={}))
    assert "left" not in "".join(lines(display))
    for step in range(2, 12):
        clock.now += 2.0
        display.show(StepFinished(stage="rl", step=step, metrics={}))
    # 10 steps took 20 s, so the other 89 take 178 s. Mutation: counting from the stage's start gives 10:31.
    assert "2:58 left" in "".join(lines(display))
    # Between two steps it counts down.
    clock.now += 1.0
    assert "2:57 left" in "".join(lines(display))


def test_what_fails_is_marked_where_it_was() -> None:
    display, _, output = make()

    def fail() -> None:
        with display:
            display.show(PhaseStarted(phase="prepare data"))
            display.show(PhaseFinished(phase="prepare data"))
            display.show(PhaseStarted(phase="start engine"))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    shown = lines(display)
    assert [line[0] for line in shown[1:-1]] == ["✓", "✗", "·", "·", "·", "·", "·"]
    assert "✗ start engine" in output.getvalue()


@pytest.fixture
def _impatient_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_impatient_threads")
def test_threads_may_report_while_the_picture_is_drawn() -> None:
    display, _, _ = make()

    def report(name: str) -> None:
        for number in range(50):
            stage = f"{name}_{number}"
            display.show(StageStarted(stage=stage, kind="rl", steps=2))
            display.show(StepFinished(stage=stage, step=2, metrics={"reward/mean": 0.5}))

    threads = [threading.Thread(target=report, args=(f"thread_{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    # Mutation: without the lock a dictionary changes its size under the picture.
    while any(thread.is_alive() for thread in threads):
        display.picture()
    assert sum("2/2" in line for line in lines(display)) == 200


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("_impatient_threads")
def test_notices_do_not_wait_for_a_picture_that_waits_for_them() -> None:
    # Mutation: a notice that is printed under the display's lock stands still here until the time is up.
    display, _, output = make()
    with display:
        display._live._refresh_thread.refresh_per_second = 1000  # type: ignore[union-attr]
        for number in range(300):
            display.show(Notice(text=f"notice {number}"))
    assert "notice 299" in output.getvalue()


def test_skipped_updates_are_told_with_the_place_of_their_batch() -> None:
    # Mutation: leave the event to the phases' lines, which know nothing of it.
    display, _, output = make(300, terminal=False)
    with display:
        display.show(UpdatesSkipped(stage="rl", step=7, trained="policy", updates=1, directory="runs/r/skipped"))
    expected = "rl, step 7: 1 update of the policy skipped, the gradient was not finite; the batch is kept in runs/r/skipped"
    assert expected in output.getvalue().splitlines()


def test_without_a_terminal_every_tenth_part_is_a_line() -> None:
    display, clock, output = make(100, terminal=False)
    with display:
        display.show(Notice(text="train: 3 prompts are left out"))
        display.show(StageStarted(stage="sft", kind="sft", steps=450))
        steps(display, clock, "sft", 450, 0.5, sft__loss=0.5)
        display.show(StageFinished(stage="sft", steps=450, seconds=225.0))
        display.close("the table")
    printed = output.getvalue().splitlines()
    assert printed[:3] == ["grpo_tiny-20261129-140312", f"log: {LOG}", "train: 3 prompts are left out"]
    # Mutation: a line for every step makes 450.
    assert [line for line in printed if line.startswith("sft: ") and "/" in line] == [f"sft: {45 * k}/450  loss 0.500" for k in range(1, 11)]
    assert printed[-1] == "the table"
    assert "\x1b" not in output.getvalue()


def test_a_phase_that_nobody_planned_gets_a_line_too() -> None:
    display, _, _ = make()
    display.show(PhaseStarted(phase="surprise"))
    assert any("surprise" in line for line in lines(display))


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (187, "3:07"), (3600 + 125, "1:02:05")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text

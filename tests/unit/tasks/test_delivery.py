"""Which entries of the log go to MLflow in one request."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine.events import EvaluationProgressed, StepFinished
from tasks.delivery import MOST_METRICS, together
from tasks.journal import Entry

STEP = st.builds(
    lambda stage, count: StepFinished(stage=stage, step=1, metrics={f"m{number}": 1.0 for number in range(count)}),
    st.sampled_from(["sft", "rl"]),
    st.integers(0, 400),
)
OTHER = st.just(EvaluationProgressed(label="base", done=1, total=2))


@given(st.lists(st.one_of(STEP, STEP, OTHER), max_size=30))
def test_steps_of_a_stage_go_together_and_nothing_changes_its_place(events: list[StepFinished | EvaluationProgressed]) -> None:
    entries = [Entry(0, event, number) for number, event in enumerate(events)]
    groups = list(together(entries))
    # Mutation: forget the last group.
    assert [entry for group in groups for entry in group] == entries
    for group in groups:
        steps = [entry.event for entry in group if isinstance(entry.event, StepFinished)]
        if len(group) > 1:
            # Mutation: do not look at the stage; steps are then drawn in another one's run.
            assert len(steps) == len(group)
            assert len({step.stage for step in steps}) == 1
        # What was not finite is counted, too. Mutation: leave the 1 out.
        assert sum(len(step.metrics) + 1 for step in steps) <= MOST_METRICS
    # As few as can be. Mutation: one by one.
    for before, after in itertools.pairwise(groups):
        a, b = before[-1].event, after[0].event
        if isinstance(a, StepFinished) and isinstance(b, StepFinished) and a.stage == b.stage:
            count = sum(len(entry.event.metrics) + 1 for entry in [*before, after[0]] if isinstance(entry.event, StepFinished))
            assert count > MOST_METRICS

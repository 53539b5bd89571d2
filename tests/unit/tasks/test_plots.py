"""Pictures of a run, judged by what they draw."""

import math
from pathlib import Path

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from engine.events import SamplesGenerated, StageStarted, StepFinished, WeightsSynchronised
from engine.reshard.ledger import Ledger
from engine.statistics import Interval
from tasks import plots
from tasks.accuracy import Accuracy
from tasks.journal import EvaluationFinished, LoggedEvent


def steps(stage: str, count: int, **metrics: float) -> list[LoggedEvent]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    started: list[LoggedEvent] = [StageStarted(stage=stage, kind="rl", steps=count)]
    return started + [StepFinished(stage=stage, step=step, metrics=named) for step in range(1, count + 1)]


def evaluation(label: str, mean: float, difficulties: tuple[str, ...] = ("2", "10", "3")) -> EvaluationFinished:
    interval = Interval(mean=mean, low=mean - 0.05, high=mean + 0.1)
    by_difficulty = dict.fromkeys(difficulties, interval)
    accuracy = Accuracy(
        samples_per_prompt=8, prompts=9, average=interval, greedy=interval, average_by_difficulty=by_difficulty, greedy_by_difficulty={}
    )
    return EvaluationFinished(label=label, stage=None, trained_steps=0, accuracy=accuracy, seconds=1, tokens=1, rows=[])


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_stage_has_the_pictures_that_its_metrics_allow(tmp_path: Path) -> None:
    events = steps(
        "rl",
        3,
        reward__mean=0.5,
        response__tokens_mean=9,
        policy__entropy=0.2,
        policy__kl_rollout=1e-9,
        timing__generate_seconds=1,
        timing__update_seconds=2,
        timing__step_seconds=4,
    ) + steps("sft", 2, sft__loss=1.0, timing__update_seconds=1, timing__step_seconds=1)
    assert set(plots.stage_figures(events, "rl")) == {"reward", "response_length", "entropy", "kl_rollout", "seconds_by_phase"}
    assert set(plots.stage_figures(events, "sft")) == {"loss"}
    assert set(plots.run_figures([*events, evaluation("base", 0.3)])) == {"accuracy", "accuracy_by_difficulty", "seconds_by_phase"}
    plots.save(plots.stage_figures(events, "rl")["reward"], tmp_path / "new" / "reward.png")
    assert (tmp_path / "new" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_loss_on_what_is_held_out_stands_beside_the_loss() -> None:
    # It is taken in some steps only. Mutation: leave it out of the picture, or ask it of every step.
    events = [
        StepFinished(stage="sft", step=step, metrics={"sft/loss": 1.0} | ({"sft/validation_loss": 2.0} if step % 3 == 0 else {}))
        for step in range(1, 7)
    ]
    (axes,) = plots.stage_figures(events, "sft")["loss"].axes
    assert sorted(len(list(line.get_xdata())) for line in axes.lines) == [2, 6]


def test_clips_bytes_and_lengths_have_their_pictures() -> None:
    """Mutations: three colours for four clips, the fourth vanishes; all steps' lengths in one histogram."""
    clips = {f"policy__clip_fraction_{kind}": 0.1 for kind in plots.CLIPPED}
    events = steps("rl", 3, sync__bytes_received=5.0, sync__bytes_minimum=4.0, **clips)
    events += [SamplesGenerated(stage="rl", step=step, rows=[{"response_tokens": step}] * 3 + [{"response_tokens": 16}]) for step in (1, 3)]
    figures = plots.stage_figures(events, "rl")
    assert set(figures) == {"clip_fractions", "synchronisation_bytes", "response_lengths"}
    assert len(figures["clip_fractions"].axes[0].lines) == 4
    assert labels(figures["synchronisation_bytes"]) == ["sync bytes received", "sync bytes minimum"]
    axes = figures["response_lengths"].axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "3"]
    drawn = [(round(bar.get_y() + bar.get_height() / 2, 2), round(bar.get_width(), 3)) for bar in axes.patches if bar.get_width() > 0]
    # Sixteen bins of one token: three samples of 1 (3) token fill their column, the one of 16 a third of it.
    assert drawn == [(1.5, 0.86), (15.5, 0.287), (3.5, 0.86), (15.5, 0.287)]


def test_rates_are_drawn_before_and_after_the_filter() -> None:
    # Mutation: the same counts twice.
    axes = plots.histogram_figure([5, 6, 7], [0, 6, 7]).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [5, 6, 7, 0, 6, 7]


def test_nothing_happened_gives_no_pictures() -> None:
    assert plots.run_figures([]) == {}
    assert plots.stage_figures([StageStarted(stage="rl", kind="rl", steps=3)], "rl") == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_any_value_can_be_drawn(value: float, tmp_path: Path) -> None:
    # Mutation: leave the finite() filter out; an all-NaN curve then has no minimum.
    events = steps("rl", 40, policy__kl_rollout=value, reward__mean=value, timing__generate_seconds=1, timing__update_seconds=value)
    for name, figure in plots.stage_figures(events, "rl").items():
        plots.save(figure, tmp_path / f"{name}.png")
    drawn = {path.stem for path in tmp_path.iterdir() if path.read_bytes().startswith(b"\x89PNG")}
    # What was never finite has no picture.
    assert drawn == ({"kl_rollout", "reward", "seconds_by_phase"} if math.isfinite(value) else set())


def test_a_gap_stays_a_gap() -> None:
    events = [StepFinished(stage="rl", step=step, metrics={"reward/mean": value}) for step, value in ((1, 0.5), (2, math.inf), (4, 1.0))]
    found = plots.curve(events, "rl", "reward/mean")
    assert list(found.steps) == [1, 2, 4]
    assert found.values[0] == 0.5
    assert math.isnan(found.values[1])


def test_moving_average_by_hand() -> None:
    # Windows of 3: (1+2)/2, (1+2+6)/3, (2+6)/2 without the NaN, (6+4)/2, 4.
    assert plots.moving_average([1, 2, 6, math.nan, 4], 3) == [1.5, 3.0, 4.0, 5.0, 4.0]


@given(st.lists(st.floats(-1e6, 1e6), max_size=30), st.integers(0, 5))
def test_moving_average_stays_inside_the_values(values: list[float], half: int) -> None:
    means = plots.moving_average(values, 2 * half + 1)
    assert len(means) == len(values)
    assert all(min(values) - 1e-6 <= mean <= max(values) + 1e-6 for mean in means)
    if half == 0:
        assert means == values


def test_kl_is_logarithmic_only_where_it_can_be() -> None:
    # Mutation: always ask for the logarithm; the zero then vanishes without a word.
    for value, scale in ((1e-9, "log"), (0.0, "linear")):
        figure = plots.stage_figures(steps("rl", 3, policy__kl_rollout=value), "rl")["kl_rollout"]
        assert figure.axes[0].get_yscale() == scale


def test_accuracy_bars_are_the_means_and_their_whiskers_the_intervals() -> None:
    events = [evaluation("base", 0.3), evaluation("rl", 0.6)]
    axes = plots.run_figures(events)["accuracy"].axes[0]
    # avg@8 of both, then greedy of both.
    assert [bar.get_height() for bar in axes.patches] == [0.3, 0.6, 0.3, 0.6]
    whiskers = [segment for lines in axes.collections for segment in lines.get_segments()]
    assert [(round(low, 6), round(high, 6)) for (_, low), (_, high) in whiskers] == [(0.25, 0.4), (0.55, 0.7), (0.25, 0.4), (0.55, 0.7)]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["base", "rl"]


def test_difficulties_stand_in_the_order_of_their_numbers() -> None:
    # Mutation: sort by the letters; 10 then stands before 2.
    figure = plots.run_figures([evaluation("base", 0.3), evaluation("rl", 0.6)])["accuracy_by_difficulty"]
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["2", "3", "10"]
    assert labels(figure) == ["base", "rl"]
    assert "accuracy_by_difficulty" not in plots.run_figures([evaluation("base", 0.3, ("all",))])


def test_phases_and_the_rest_sum_to_the_steps() -> None:
    events = steps("rl", 3, timing__generate_seconds=1, timing__update_seconds=2, timing__step_seconds=4)
    assert plots.phase_seconds(events, "rl") == {"generate": 3, "update": 6, "other": 3}


def test_parts_of_synchronisations_are_the_mean_of_the_ranks() -> None:
    """One rank waits while the other loads: the largest of each part would be 6 s of 4. Mutations: max instead of the mean; another stage's."""
    ranks = [Ledger(transfer_seconds=2, proof_seconds=1, wait_seconds=1, seconds=4), Ledger(load_seconds=3, proof_seconds=1, seconds=4)]
    events = [WeightsSynchronised(stage=stage, step=step, version=step, ranks=ranks) for step in (1, 2) for stage in ("rl", "again")]
    figure = plots.stage_figures(events, "rl")["synchronisation"]
    assert [(bar.get_y(), bar.get_height()) for bar in figure.axes[0].patches[::2]] == [(0, 1), (1, 1.5), (2.5, 0), (2.5, 1), (3.5, 0.5)]
    assert labels(figure) == ["transfer", "load", "pack", "proof", "wait"]
    # One of them, as SFT has, is no picture over steps; neither are those of old logs.
    assert plots.stage_figures(events[:2], "rl") == {}
    assert plots.stage_figures([WeightsSynchronised(stage="rl", step=step, version=step) for step in (1, 2)], "rl") == {}


def test_many_steps_become_few_bars_of_the_same_height() -> None:
    phases = {"generate": plots.Curve(range(1, 101), [2.0] * 100), "update": plots.Curve(range(1, 101), [1.0] * 100)}
    bars = plots.seconds_by_step_figure("t", phases, plots.PHASES).axes[0].patches
    assert len(bars) == 2 * plots.STEP_BUCKETS
    assert {bar.get_height() for bar in bars} == {2.0, 1.0}
    assert {bar.get_y() for bar in bars} == {0.0, 2.0}


def test_the_style_of_the_user_is_left_alone() -> None:
    before = dict(matplotlib.rcParams)
    plots.run_figures([evaluation("base", 0.3)])
    assert dict(matplotlib.rcParams) == before

"""Nights: verdicts from records, their history, and the page."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from synthetic_runs import as_json, eight_seeds, in_nights, synthetic_run

from tasks import night_report, nights, reference
from tasks.nights import NightRecord


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture
def known() -> reference.Reference:
    return eight_seeds()


def night(known: reference.Reference, number: int, shift: Mapping[str, float] | None = None, until: float = 1.0) -> NightRecord:
    settings = in_nights(1000 + number)
    run = synthetic_run(settings, f"small-20261130-0{number:05}", shift=shift, until=until)
    judged = nights.judged(f"202612{number:02}-020000", known, settings, "finished" if until == 1.0 else "stopped", run, None, 590.0)
    return nights.record(f"202612{number:02}-020000", 3600.0, [judged])


def test_a_good_night_is_within_and_a_bad_one_is_worse_and_names_the_metric(known: reference.Reference) -> None:
    assert night(known, 1).recipes[0].word == "within"
    bad = night(known, 2, {"reward/mean": -0.6})
    assert bad.worse
    assert [(verdict.stage, verdict.metric) for verdict in bad.recipes[0].verdicts if verdict.verdict == "worse"] == [("rl", "reward/mean")]
    as_json((nights.directory(bad.night) / nights.RECORD).read_text())


def test_nights_are_remembered_with_the_reference_that_they_belong_to(known: reference.Reference) -> None:
    """Mutation: newest first; the spread of older nights would be taken for the newest's mean."""
    for number in (1, 2, 3):
        night(known, number, {"reward/mean": -0.6} if number == 3 else None)
    identity = reference.digest(known)
    past = nights.past("small", identity, before="20261204-020000", stages=["rl"])
    assert len(past) == 3
    assert [("rl", "reward/mean") in one.within for one in past] == [True, True, False]
    assert nights.past("small", "another", before="20261204-020000", stages=["rl"]) == []
    assert len(nights.past("small", identity, before="20261203-020000", stages=["rl"])) == 2
    good = nights.last_good("small", "20261204-020000", None)
    assert good is not None
    assert good[0].night == "20261202-020000"
    assert nights.last_good("small", "20261201-020000", None) is None


def test_a_night_cut_short_is_insufficient_and_no_good_one(known: reference.Reference) -> None:
    short = night(known, 1, until=0.5)
    assert (short.recipes[0].word, short.worse) == ("insufficient", False)
    assert {verdict.covered for verdict in short.recipes[0].verdicts if verdict.metric != "accuracy/average"} == {0.5}
    assert nights.last_good("small", "20261209-020000", None) is None
    assert night(known, 2, {"reward/mean": -0.6}, until=0.5).worse


def test_a_run_that_failed_is_worse_and_one_that_was_not_started_is_insufficient(known: reference.Reference) -> None:
    failed = nights.judged("20261201-020000", known, in_nights(9), "failed", None, "a worker died", 3.0)
    assert failed.word == "worse"
    idle = nights.not_started(known, in_nights(9), "no time")
    assert idle.word == "insufficient"
    page = night_report.to_html(nights.record("20261201-020000", 10.0, [failed, idle]), [known, known])
    assert "a worker died" in page
    assert "no time" in page


def test_the_page_holds_everything_and_loads_nothing(known: reference.Reference) -> None:
    """Mutation: autoescape off; the reason's tag would be one."""
    night(known, 1)
    record = night(known, 2, {"reward/mean": -0.6, "policy/entropy": 0.9})
    page = night_report.to_html(record, [known])
    assert not re.findall(r"(?:src|href)=\"(?!#)|url\(|@import|<script", page)
    for text in ("rl reward/mean", "since the last good night, 20261201-020000", "Seconds by phase", "polyline", "Packages", "worse"):
        assert text in page
    assert page.count('<svg class="curve"') == 9
    assert "nan" not in re.sub(r"<(style|pre)>.*?</\1>", "", page, flags=re.DOTALL)
    hostile = record.recipes[0].model_copy(update={"reason": "<b>broken"})
    assert "&lt;b&gt;broken" in night_report.to_html(record.model_copy(update={"recipes": [hostile]}), [known])

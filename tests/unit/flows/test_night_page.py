"""The nightly flow, without runs."""

import logging
from pathlib import Path
from typing import Any

import pytest

from flows import nightly
from tasks import nights
from tasks.progress import Notice


def test_a_night_whose_page_cannot_be_drawn_has_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Mutation: draw without `page.drawing`; or before the record is written."""

    def broken(*arguments: Any) -> str:
        raise KeyError("a chart")

    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    monkeypatch.setattr(nightly.night_report, "to_html", broken)
    told: list[Any] = []
    with caplog.at_level(logging.ERROR):
        record = nightly._judged("20261201-020000", [], 60.0, told.append)
    written = nights.directory("20261201-020000") / nights.RECORD
    assert list(nights.nights()) == [record]
    (notice,) = told
    assert isinstance(notice, Notice)
    assert notice.text == f"the page of night 20261201-020000 could not be drawn: KeyError: 'a chart'; its numbers are in {written}"
    assert "Traceback" in caplog.text
    assert not nightly.page_of(record).exists()

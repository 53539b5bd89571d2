"""The pages about runs: all numbers are the record's, and nothing is loaded from elsewhere."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from synthetic_runs import synthetic_run
from trace_example import example

from engine.events import PromptsScored, SamplesGenerated
from engine.reshard.ledger import Ledger
from engine.statistics import Interval
from tasks import compare_page, drop_easy, journal, page, record, run_report, show, traces, workspace
from tasks.accuracy import Accuracy
from tasks.compose import compose
from tasks.journal import EvaluationFinished, FileSaved, RunStarted
from tasks.outcomes import Outcome
from tasks.record import RunRecord, StageRecord, Synchronisations

CONFIG = compose(["recipe=grpo_tiny", "name=small", "stages.sft.steps=30", "stages.rl.steps=30"])
RUN, OTHER = "small-20261130-000001", "small-20261130-000002"
HOSTILE = "<script>alert('x')</script> 5"


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))


class Parsed(HTMLParser):
    """What a page refers to, and its cells and titles as text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.captions: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "data", "action", "poster", "srcset")]
        self._open.append(tag)
        if tag in ("td", "th", "figcaption"):
            (self.captions if tag == "figcaption" else self.cells).append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "figcaption" in self._open:
            self.captions[-1] += data
        elif self._open and {"td", "th"} & set(self._open):
            self.cells[-1] += data


def evaluated(label: str, mean: float, responses: list[str]) -> EvaluationFinished:
    """By two difficulties, with the same samples whatever the label is."""
    interval = Interval(mean=mean, low=mean - 0.05, high=mean + 0.05)
    by = {"2": interval, "10": Interval(mean=mean / 2, low=0.0, high=mean)}
    accuracy = Accuracy(samples_per_prompt=8, prompts=40, average=interval, greedy=interval, average_by_difficulty=by, greedy_by_difficulty=by)
    rows = [
        {
            "sample_id": f"{label}/p{number}/0",
            "prompt": f"{number}+1=",
            "response": response,
            "reward": float(number),
            "ground_truth": str(number + 1),
            "difficulty": "2",
            "response_tokens": 3 + number,
        }
        for number, response in enumerate(responses)
    ]
    return EvaluationFinished(
        label=label, stage=None if label == "base" else label, trained_steps=0, accuracy=accuracy, seconds=1.0, tokens=9, rows=rows
    )


def whole(tmp_path: Path) -> RunRecord:
    """A run with everything that a page can show."""
    run = synthetic_run(CONFIG, RUN)
    log = workspace.run_directory(RUN) / "events.jsonl"
    settings = CONFIG.model_dump(mode="json")
    settings["stages"] |= {
        "rate": {"keep": {"min_rate": 0.0, "max_rate": 0.75}},
        "easy": {"scores_of": ["rl"], "estimator": "mean", "threshold": 0.9, "min_visits": 1},
    }
    rate, easy, search, rl = (tmp_path / name for name in ("rate", "easy", "search", "rl"))
    for directory in (rate, easy, search, rl):
        directory.mkdir()
    (rate / "histogram.json").write_text(json.dumps({"samples_per_prompt": 4, "prompts_by_right_samples": [5, 6, 7, 8, 9]}))
    drop_easy.begin_log(rl / drop_easy.SCORES)
    drop_easy.append(rl / drop_easy.SCORES, PromptsScored(stage="rl", step=1, prompts=["a", "b", "c"], outcomes=[0.25, 1.0, 1.0], samples=[4, 4, 4]))
    curve = {"diversity": 0.5, "accuracy": 0.4, "accuracy_low": 0.3, "accuracy_high": 0.5, "entropy": 1.0, "entropy_temperature_1": 0.9}
    points = [{"temperature": temperature, **curve} for temperature in (0.6, 0.8, 1.0)]
    (search / "temperature.json").write_text(json.dumps({"points": points, "picked": {"temperature": 0.8}}))
    run.stage("rl").output = str(rl)
    run.stage("rl").interval, run.stage("rl").gain_interval, run.stage("rl").samples_per_prompt = (0.5, 0.7), (0.1, 0.3), 8
    run.stage("rl").synchronisations = Synchronisations(count=2, ranks=[Ledger(bytes_received=4_000_000, bytes_minimum=3_000_000), Ledger()])
    run.stages += [
        StageRecord(name="rate", kind="difficulty", steps_planned=None, output=str(rate), results={"kept": 26.0, "pass_rate": 0.5}),
        StageRecord(name="easy", kind="drop_easy", steps_planned=None, output=str(easy)),
        StageRecord(name="search", kind="temperature_search", steps_planned=None, output=str(search)),
    ]
    quality = tmp_path / "quality"
    quality.mkdir()
    verdict = {
        "made": "2026-11-30",
        "problems": ["train: 3 rows are bad"],
        "checks": 20,
        "rows": {"train": 1234},
        "dropped": {"train": {"too_long": 7}},
    }
    (quality / "summary.json").write_text(json.dumps(verdict | {"digests": {"train": "5" * 64}}))
    samples = [{"response_tokens": 4}, {"response_tokens": 9}]
    for number, event in enumerate(
        (
            RunStarted(run=RUN, recipe="small", description="sums & more", configuration=settings, lineage={}, tags={}),
            FileSaved(stage=None, file=str(quality / "summary.json"), folder="data_quality"),
            SamplesGenerated(stage="rl", step=1, rows=samples),
            evaluated("base", 0.1, ["bad"] * 12),
            evaluated("rl", 0.6, [HOSTILE, *["good"] * 11]),
        )
    ):
        journal.append(log, event, time_ms=10_000 + number)
    traces.save(RUN, replace(example(split=True), stage="rl"))
    record.write(run)
    return run


def html(run: str) -> str:
    return run_report.to_html(Outcome.of(record.load(run)))


def alone(text: str) -> Parsed:
    """Refers to nothing but itself."""
    parsed = Parsed(text)
    assert [reference for reference in parsed.references if not reference.startswith("#")] == []
    assert not parsed.tags & {"script", "link", "iframe", "object", "img", "base"}
    style = re.sub(r"/\*.*?\*/", "", "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL)))
    assert not re.findall(r"url\(|@import", style)
    assert "default-src 'none'" in text
    assert not re.findall(r'="[^"]*\bnan\b', text)
    return parsed


def test_the_page_has_everything_and_its_numbers_are_the_records(tmp_path: Path) -> None:
    """Mutations: leave any section out of `sections`; accuracies of another stage; autoescape off."""
    run = whole(tmp_path)
    text = html(RUN)
    parsed = alone(text)
    for stage in show.trained(run):
        assert {show.percent(stage.accuracy_after, stage.interval), show.gain(stage), f"{stage.steps} of {stage.steps_planned}"} <= set(parsed.cells)
    assert {
        "After each stage",
        "avg@8 by difficulty",
        "SFT loss, nats per token",
        "Reward",
        "Entropy, nats per token",
        "Clipped share of tokens",
        "In training, by stage and step; tokens",
        "In evaluations; tokens",
        "rate: prompts by right samples of 4",
        "easy: prompts by outcome",
        "search: accuracy over temperature, picked 0.8",
        "search: entropy over temperature, nats per token",
        "Seconds by phase",
        "Weights, bytes per synchronisation of the rank that receives most",
    } <= set(parsed.captions)
    assert text.count("<figure") == text.count('<svg class="curve"') == len(parsed.captions)
    # Difficulties by value: 10 comes after 2.
    assert re.search(r">2</text>.*?>10</text>", text)
    # Of five right of four, nine prompts are above the range; of the visited, two are too easy.
    assert "4, all prompts: 9" in text
    assert "4, kept: 0" in text
    assert "3, kept: 8" in text
    assert "1, visited prompts: 2" in text
    assert "1, kept: 0" in text
    assert "rl, received: 2.0 MB" in text
    assert "rl, minimum: 1.5 MB" in text
    assert 'class="graph"' in text
    assert "1 of 20 checks failed" in text
    assert "train: 3 rows are bad" in text
    assert "1,234" in parsed.cells
    assert run.lineage.configuration_digest in parsed.cells
    assert "sums &amp; more" in text
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; 5" in text
    assert text.count('class="pair"') == run_report.GENERATIONS


def test_generations_are_of_the_same_prompts(tmp_path: Path) -> None:
    # Mutation: rows paired by their place; the evaluations' tables may begin elsewhere.
    whole(tmp_path)
    log = workspace.run_directory(RUN) / "events.jsonl"
    last = evaluated("last", 0.7, [f"answer {number}" for number in range(12)])
    journal.append(log, EvaluationFinished(**{field: getattr(last, field) for field in last.__slots__} | {"rows": last.rows[::-1]}), time_ms=20_000)
    pairs = list(run_report._generations(Outcome.of(record.load(RUN))))
    assert [(pair["prompt"], pair["responses"][1]["text"]) for pair in pairs[:2]] == [("0+1=", "answer 0"), ("1+1=", "answer 1")]


def test_a_run_that_failed_at_once_has_a_page_too() -> None:
    run = RunRecord(run=RUN, recipe="small", seed=0, lineage=synthetic_run(CONFIG, OTHER).lineage, error="train.jsonl: <gone>", status="failed")
    record.write(run)
    text = html(RUN)
    alone(text)
    assert "train.jsonl: &lt;gone&gt;" in text
    assert "<figure" not in text


def test_a_stage_that_lay_ready_has_its_curve_and_says_whose_it_is(tmp_path: Path) -> None:
    # Mutation: `Outcome` with the run's own log alone.
    whole(tmp_path)
    second = synthetic_run(CONFIG, OTHER, log_of=["rl"])
    second.stages[0] = record.load(RUN).stage("sft").model_copy(update={"reused_from": RUN})
    record.write(second)
    parsed = alone(html(OTHER))
    assert "SFT loss, nats per token" in parsed.captions
    assert RUN in parsed.cells


def test_what_a_stage_has_left_may_be_gone(tmp_path: Path) -> None:
    whole(tmp_path)
    for name in ("rate", "easy", "search", "rl", "quality"):
        shutil.rmtree(tmp_path / name)
    parsed = alone(html(RUN))
    assert not [caption for caption in parsed.captions if "prompts by" in caption or "temperature" in caption]
    assert "Reward" in parsed.captions


def test_runs_side_by_side(tmp_path: Path) -> None:
    """Mutations: the first run's curve twice; differences of a run from itself."""
    whole(tmp_path)
    other = synthetic_run(CONFIG.model_copy(update={"seed": 7}), OTHER, shift={"reward/mean": 0.5})
    outcomes = [Outcome.of(record.load(run)) for run in (RUN, OTHER)]
    text = compare_page.to_html(outcomes)
    parsed = alone(text)
    assert {RUN, OTHER, show.percent(other.stage("rl").accuracy_after)} <= set(parsed.cells)
    (reward,) = re.findall(r"<figcaption>Reward</figcaption>.*?</figure>", text, re.DOTALL)
    lines = re.findall(r'<polyline class="line (c\d)" points="([^"]+)"', reward)
    assert [css for css, _ in lines] == ["c0", "c1"]
    assert lines[0][1] != lines[1][1]
    assert re.search(r"<td>seed</td><td>0</td><td>7</td>", text)
    assert "packages, machine: the same." in text
    # Mutation: all ids in the name, however many; no file system takes it.
    names = {compare_page.path([*outcomes, *outcomes[:more]] * 9).name for more in (0, 1, 2)}
    assert len(names) == 3
    assert max(map(len, names)) < 255


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium here")
def test_a_browser_draws_it_and_prints_it(tmp_path: Path) -> None:
    """Mutation: a content policy that refuses the page's own style; all text would be black on white."""
    whole(tmp_path)
    path = run_report.path(RUN)
    page.write(path, html(RUN))
    picture, paper = tmp_path / "page.png", tmp_path / "page.pdf"
    chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}"]
    for arguments in ([f"--screenshot={picture}", "--window-size=1280,3000"], [f"--print-to-pdf={paper}"]):
        subprocess.run([*chromium, *arguments, path.as_uri()], check=True, capture_output=True, timeout=240)
    with Image.open(picture) as drawn:
        colours = {colour: count for count, colour in drawn.convert("RGB").getcolors(2**24) or []}
        assert drawn.size == (1280, 3000)
    for role in ("#2f6fde", "#d9730d"):
        assert colours.get(tuple(bytes.fromhex(role[1:])), 0) > 2000, f"nothing is drawn in {role}"  # type: ignore[call-overload]
    assert paper.read_bytes().startswith(b"%PDF")

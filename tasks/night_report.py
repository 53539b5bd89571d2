"""A night as one page of HTML, to be opened from a file, sent by mail or printed. Nothing is loaded from elsewhere."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from tasks import charts, differences, nights, page
from tasks.charts import Band, Line
from tasks.comparison import JUDGED, Verdict
from tasks.curves import Series
from tasks.lineage import PATCH
from tasks.nights import NightRecord, RecipeNight
from tasks.page import number
from tasks.record import StageRecord
from tasks.reference import MetricReference, Reference

BAND = 2.0
"""Standard deviations between runs, to both sides of their mean."""

PATCH_LINES = 400
"""Of what is not committed, at most."""
WORDS = ("worse", "insufficient", "better", "within")
SPEAKS = {"value": "value", "mean": "mean of the curve", "end": "last quarter", "peak": "a part of the curve", "noise": "noise between steps"}


def to_html(night: NightRecord, references: Sequence[Reference]) -> str:
    """The page, as text.

    Args:
        night: whose directory holds what the code had beyond its commit.
        references: of its recipes, in their order.
    """
    words = [recipe.word for recipe in night.recipes]
    return page.render(
        "night.html",
        night=night,
        word=next(word for word in WORDS if word in words),
        recipes=[_shown(night, recipe, known) for recipe, known in zip(night.recipes, references, strict=True)],
        seconds=sum(recipe.seconds for recipe in night.recipes),
        band=f"{BAND:g}",
    )


def _shown(night: NightRecord, recipe: RecipeNight, known: Reference) -> dict[str, Any]:
    """What the page says of one recipe."""
    stages = list(dict.fromkeys(verdict.stage for verdict in recipe.verdicts))
    counts = {word: sum(verdict.verdict == word for verdict in recipe.verdicts) for word in WORDS}
    return {
        "night": recipe,
        "reference": known,
        "counts": {word: count for word, count in counts.items() if count},
        "worst": sorted((v for v in recipe.verdicts if v.verdict == "worse"), key=lambda v: v.p),
        "rows": {stage: [_row(verdict) for verdict in recipe.verdicts if verdict.stage == stage] for stage in stages},
        "curves": {stage: curves for stage in stages if (curves := _curves(recipe, known, stage))},
        "stages": [_stage(stage, known) for stage in recipe.stages],
        "cost": _cost(recipe, known),
        **_changes(night, recipe),
        "expected": nights.expected_seconds(known, recipe.part),
        "before": len(nights.past(recipe.name, recipe.reference_digest, before=night.night, stages=recipe.summary)),
    }


def _changes(night: NightRecord, recipe: RecipeNight) -> dict[str, Any]:
    """Tonight beside the last good night. The seed is another one every night, and with it are data that are generated from it."""
    good = nights.last_good(recipe.name, night.night, recipe.part)
    found = differences.between(recipe.lineage if good is None else good[1].lineage, recipe.lineage)
    patch = (nights.directory(night.night) / PATCH).read_text(errors="replace").splitlines()
    return {
        "since": None if good is None else good[0].night,
        "changes": found,
        "configuration": [change for change in found.configuration if change[0] != "seed"],
        "generated": recipe.lineage.configuration["data"].get("chain_sum") is not None,
        "patch": "\n".join(patch[:PATCH_LINES]),
    }


def _row(verdict: Verdict) -> dict[str, Any]:
    low, high = verdict.limits
    limits = [f"{sign} {number(limit)}" for sign, limit in (("<", low), (">", high)) if math.isfinite(limit)]
    over = "" if verdict.nights <= 1 else f", mean of {verdict.nights} nights"
    said = f"{SPEAKS[verdict.statistic]}{over}: {verdict.statistic_deviation:+.1f} sd" if verdict.statistic else "nothing to test"
    return {"verdict": verdict, "good": JUDGED[verdict.metric].good, "limits": " or ".join(limits) or "-", "said": said}


def _curves(recipe: RecipeNight, known: Reference, stage: str) -> list[dict[str, Any]]:
    found = []
    for verdict in recipe.verdicts:
        metric = known.stages[stage].metrics.get(verdict.metric) if verdict.stage == stage else None
        if metric is not None and len(metric.mean) > 1:
            now = recipe.summary.get(stage, {}).get(verdict.metric)
            found.append({"verdict": verdict, "svg": _chart(metric, now, known.stages[stage].steps, verdict.verdict)})
    return found


def _chart(known: MetricReference, tonight: Series | None, steps: int, word: str) -> Markup:
    """One metric of a stage over its windows: tonight's line, in the colour of its verdict, over the reference's band."""
    centres = [float(part.mean()) + 1 for part in np.array_split(np.arange(steps), len(known.mean))]
    mean, spread = np.asarray(known.mean), np.nan_to_num(np.asarray(known.spread))
    now = [math.nan] * len(mean) if tonight is None or len(tonight.windows) != len(mean) else tonight.windows
    band = Band(css="", xs=centres, low=(mean - BAND * spread).tolist(), high=(mean + BAND * spread).tolist())
    shown = [Line(css="mean", xs=centres, ys=mean.tolist()), Line(css=f"now {word}", xs=centres, ys=now)]
    return charts.lines(shown, bands=[band], x_range=(1, steps))


def _stage(stage: StageRecord, known: Reference) -> dict[str, Any]:
    there = known.stages[stage.name].metrics.get("accuracy/average") if stage.name in known.stages else None
    return {"record": stage, "accuracy": there and there.mean[0], "spread": there and there.spread[0]}


def _cost(recipe: RecipeNight, known: Reference) -> list[dict[str, Any]]:
    """Seconds by stage and phase, tonight's beside the reference's."""
    rows = []
    for stage in recipe.stages:
        before = known.stages[stage.name].seconds_by_phase if stage.name in known.stages else {}
        for phase in dict.fromkeys([*before, *stage.seconds_by_phase]):
            now, then = stage.seconds_by_phase.get(phase), before.get(phase)
            rows.append({"stage": stage.name, "phase": phase, "now": now, "then": then, "ratio": now / then if now is not None and then else None})
    return rows

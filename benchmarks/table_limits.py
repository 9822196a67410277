"""How few bytes can `auto` send before accuracy suffers? Density and rounds of its controller, on the paper's links.

    python benchmarks/table_limits.py --quick
    python benchmarks/table_limits.py                          # an hour of one core; 1,500 steps, one seed
    python benchmarks/table_limits.py --seeds 3

The goal is 3,000 times fewer bytes over the WAN than the baseline, both directions, at 0.1 points below its accuracy
or better. With two sites a round of density d costs about d (log2(1/d) + 2.6) bits an element in each direction,
because the push of the other site comes down as it went up. So half the density saves a little less than half of the
bytes, and half the rounds save exactly half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from charts import Chart, Dot, Dots
from result_table import ResultTable
from table_runs import Cell, Found, Strategy, cells, columns, row_difference, rows, run, table
from tables import ROOT, Claim, Difference, Document, Options, main, number

from weightgrad.core.controller.update_controller import Auto
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.comparison_table import seeds_text
from weightgrad.lab.report.runs import Run

PART = "auto by density and rounds"
BASELINE = "baseline"
FEWER = 3000  # times fewer bytes: the goal
BELOW = 0.1  # points below the baseline that it may cost


@dataclass(frozen=True)
class Setting:
    """The settings of a controller: the share of entries in a push, the steps between rounds, and the length."""

    density: float
    every: int
    longer: Fraction = Fraction(1)  # in multiples of the baseline's steps

    @property
    def name(self) -> str:
        more = "" if self.longer == 1 else f", {self.longer} of the steps"
        return f"{100 * self.density:g} %, every {self.every}{more}"

    @property
    def controller(self) -> Auto:
        return Auto(density=self.density, every=self.every, least=min(self.density, Auto.least), alike=0)

    @property
    def strategy(self) -> Strategy:
        """The strategy with all settings, so that it does not change with the defaults."""
        own = self.controller
        text = f"auto(density={own.density:g}, every={own.every}, least={own.least:g}, alike=0)"
        return {"name": "auto", "controller": text}

    def kept(self, run: Run) -> float:
        """The share of the run in which the sync schedule was the one of this setting."""
        times = [*(float(line["t"]) for line in run.schedules), float(run.summary["virtual_seconds"])]
        asked = (self.every, self.controller.usual.up)
        held = sum(
            until - since
            for line, since, until in zip(run.schedules, times, times[1:], strict=False)
            if (line["every"], line["up"]) == asked
        )
        return held / times[-1] if times[-1] else 0.0


DEFAULT = Setting(Auto.density, Auto.every)
SETTINGS = (
    *(Setting(density, 4) for density in (0.01, 0.005, 0.0025)),
    Setting(0.01, 8),
    Setting(0.0025, 4, Fraction(4, 3)),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
# About the same bytes: more frequent and sparser, or less frequent and denser.
ALIKE = ((Setting(0.005, 4), Setting(0.01, 8)),)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of the runs, the model and the data."""

    steps: int = number(1500, "steps")
    seeds: int = number(1, "seeds of each row")
    batch: int = number(128, "images a step over all workers")
    evaluate_on: int = number(10_000, "test images; 10,000 are all")
    data: str = "cifar10"
    model: str = "cifarnet"


QUICK = Plan(steps=30, batch=16, evaluate_on=200, data="digits", model="lenet-digits")


def recipe(plan: Plan, longer: Fraction = Fraction(1)) -> Recipe:
    """The links of the paper, evaluated every sixth of the baseline's steps."""
    return Recipe.load(ROOT / "recipes" / "paper.yaml").with_settings(
        [
            f"data.name={plan.data}",
            f"model.name={plan.model}",
            f"training.steps={round(plan.steps * longer)}",
            f"training.batch={plan.batch}",
            f"training.evaluate_on={plan.evaluate_on}",
            f"training.evaluate_every={max(1, plan.steps // 6)}",
        ]
    )


def wanted(plan: Plan) -> list[Cell]:
    """The runs of the baseline and of every setting."""
    found = cells(PART, recipe(plan), {BASELINE: BASELINE}, plan.seeds)
    for one in SETTINGS:
        found += cells(PART, recipe(plan, one.longer), {one.name: one.strategy}, plan.seeds)
    return found


@dataclass(frozen=True)
class Outcome:
    """The bytes and the accuracy of a setting, compared with the baseline."""

    setting: Setting
    ratio: float  # times fewer bytes
    far: Difference

    @property
    def good(self) -> bool | None:
        """Whether it is at most `BELOW` points below the baseline; None if the error is too large to tell."""
        return self.far.above(-BELOW)

    def text(self) -> str:
        return f"{self.ratio:,.0f} times with {self.setting.name} ({self.far.text()})"


def outcomes(part: Mapping[str, Sequence[Run]], tested: int) -> list[Outcome]:
    """The outcomes of the settings that have both, most bytes first."""
    found = []
    for row in rows(part):
        far = row_difference(part, row["name"], BASELINE, tested)
        if row["name"] in BY_NAME and far is not None and row["ratio"] is not None:
            found.append(Outcome(BY_NAME[row["name"]], row["ratio"], far))
    return sorted(found, key=lambda one: one.ratio)


def any_good(of: Sequence[Outcome]) -> bool | None:
    """True if one is good, False if none is, None if the errors are too large to tell."""
    found = [one.good for one in of] or [None]
    return True if True in found else None if None in found else False


def goal(found: Sequence[Outcome]) -> Claim:
    """Whether a setting reaches the goal."""
    what = f"`auto` sends at least {FEWER:,} times fewer bytes than the baseline at most {BELOW} points below it."
    there = [one for one in found if one.ratio >= FEWER]
    if not there:
        whole = len(found) == len(SETTINGS)
        return Claim(what, False if whole else None, f"No setting here saves so much; the most: {found[-1].text()}.")
    return Claim(what, any_good(there), f"{'; '.join(one.text() for one in there)}.")


def limit(found: Sequence[Outcome]) -> Claim:
    """How many bytes can be saved without a loss of accuracy."""
    usual = next((one.ratio for one in found if one.setting == DEFAULT), 1.0)
    sparser = [one for one in found if one.ratio > usual]
    what = f"Fewer bytes than with the default ({DEFAULT.name}) are possible at most {BELOW} points below the baseline."
    texts = {word: [one.text() for one in found if one.good is word] or ["none"] for word in (True, None, False)}
    said = [
        f"The most saved by a setting that is measurably no further below: {texts[True][-1]}.",
        f"By one of which that cannot be told: {texts[None][-1]}.",
        f"The least by one that measurably is further below: {texts[False][0]}.",
    ]
    return Claim(what, any_good(sparser), " ".join(said))


def claims(part: Mapping[str, Sequence[Run]], tested: int) -> list[Claim]:
    """The goal, the limit, every setting by itself, and which way of saving is better."""
    found = outcomes(part, tested)
    if not found:
        return []
    made = [goal(found), limit(found)]
    for one in found:
        what = f"{one.setting.name}: at most {BELOW} points below the baseline."
        made.append(Claim(what, one.good, f"{one.far.text()}; {one.ratio:,.0f} times fewer bytes."))
    ratios = {one.setting: one.ratio for one in found}
    for often, seldom in ALIKE:
        far = row_difference(part, often.name, seldom.name, tested)
        if far is not None and often in ratios and seldom in ratios:
            what = f"More frequent and sparser is better: {often.name} above {seldom.name}."
            saved = f"{ratios[often]:,.0f} and {ratios[seldom]:,.0f} times fewer bytes"
            made.append(Claim(what, far.above(0.0), f"{far.text()}, with {saved}."))
    return made


def tables(part: Mapping[str, Sequence[Run]]) -> list[ResultTable]:
    """A table of all rows, with the share of the run that had the requested sync schedule."""
    shown = columns(
        *("accuracy", "spread", "points", "wan_mb", "ratio", "ratio_to", "speedup_to", "reached", "waiting"),
        first="density, steps between rounds",
    )
    about = (
        "Δ is against the baseline. Same accuracy: bytes (time) of the baseline until it first has 99 % of what it "
        "ends with, over the row's until it has that; – where it never does. Schedule kept: the share of the run in "  # noqa: RUF001
        "which the controller had set what the row asks for; before that it looks at the links."
    )
    made = table(PART, about, [*shown, ("schedule kept %", "kept", "{:.1f}")], part)
    for row in made.rows:
        setting = BY_NAME.get(row["name"])
        if setting is not None:
            row["kept"] = 100 * min(setting.kept(one) for one in part[row["name"]])
            row["row"] += " (default)" if setting == DEFAULT else ""
    return [made]


def charts(part: Mapping[str, Sequence[Run]], tested: int) -> dict[str, Chart]:
    """Accuracy against bytes saved."""
    reference = next((row["accuracy"] for row in rows(part) if row["name"] == BASELINE), None)
    if reference is None:
        return {}
    series: dict[str, list[Dot]] = {}
    for one in sorted(outcomes(part, tested), key=lambda one: (one.setting.every != DEFAULT.every, one.setting.every)):
        dot = Dot(one.ratio, reference + one.far.points, one.far.twice, one.setting.name)
        series.setdefault(f"every {one.setting.every}, {one.setting.longer}", []).append(dot)
    chart = Dots(
        series=series,
        title="auto: accuracy against bytes saved, by density and steps between rounds",
        x="times fewer WAN bytes than the baseline, log scale",
        y="accuracy %, ± two standard errors",
        horizontal={f"baseline, {reference:.2f} %": reference, f"{BELOW} points below": reference - BELOW},
        vertical={f"goal: {FEWER:,} times": FEWER},
    )
    return {"bytes": chart}


def rests_on(plan: Plan, found: Found) -> list[str]:
    """Steps, seeds, and how the settings are compared."""
    return [
        f"Here: {plan.model} on {plan.data} over the links of recipes/paper.yaml, {plan.steps} steps of {plan.batch} "
        f"images, {seeds_text(plan.seeds)} each, SGD 0.05 with momentum 0.9 and cosine, {plan.evaluate_on:,} test "
        f"images, evaluated every {max(1, plan.steps // 6)} steps.",
        "Settings are compared on the test set that the accuracies are of, and the default was chosen by it too: the "
        "best row's figure is biased upwards by the choice. What is far below the baseline is not.",
        "± of a difference is two standard errors: of the seeds where there are several and those are larger, else of "
        "the test images alone; what another seed would do is then not in it. It takes no account of how many settings "
        "are looked at.",
        "The steps are the same for all rows but those that say otherwise: these train longer than the baseline, with "
        "the schedule stretched, and pay for fewer bytes with more compute.",
        *found.facts(),
    ]


MEASURED = [
    "Measured: accuracies of the global model, bytes of every message in both directions, rounds, sync schedules.",
    "Modelled: seconds. Compute is 30 ms a step with 10 % jitter, links and LAN are the paper's bandwidths with delays "
    "that it does not give (11 and 25 ms one way); codecs cost what `weightgrad bench codecs` measured. Sync schedules "
    "follow from these seconds.",
    "`auto` flushes nothing at the end: the residuals of sites and server are in no row's bytes and in no row's "
    "accuracy.",
]


def make(plan: Plan, options: Options) -> Document:
    """Make the missing runs, and the document."""
    found = run(wanted(plan), options)
    part = found.parts.get(PART, {})
    return Document(
        title="How few bytes `auto` can send before accuracy suffers",
        rests_on=rests_on(plan, found),
        tables=tables(part),
        claims=claims(part, plan.evaluate_on),
        measured=MEASURED,
        charts=charts(part, plan.evaluate_on),
        failures=found.failures,
    )


if __name__ == "__main__":
    main(Plan(), QUICK, __doc__ or "", make)

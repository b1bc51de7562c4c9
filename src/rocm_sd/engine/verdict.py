"""A report in five lines of 80 columns at most: the verdict first, then what it rests on, then what to type for more.

Each line is a fact of the pipeline as it is now. A reason that many modules share is told once, with their number.
Where one is longer than its line, the table has it in full.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rocm_sd.engine.installed import MEASURED, SHIPPED, WAITS, Approximated, Graphs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rocm_sd.engine.reporting import Report
    from rocm_sd.rewrite import Change

__all__ = ["count_replaced", "verdict"]

WIDTH = 80
_LINES = 5
_MORE = "print(rocm_sd.report(pipe, verbose=True))"
_MOST_NAMED = 2
_EXACT = "Quality exact: nothing is approximated"
_NAMES = {"UNet2DConditionModel": "UNet", "Decoder": "VAE"}


def verdict(report: Report) -> list[str]:
    """The headline, the most important remarks, and what to type."""
    remarks = [*_trouble(report), *_level_and_quality(report), *_plans(report), *_skipped(report)]
    shown = remarks[: _LINES - 2]
    left = len(remarks) - len(shown)
    more = f"More ({left} other remark{'' if left == 1 else 's'})" if left else "More"
    return [_fitting(_headline(report)), *map(_fitting, shown), f"{more}: {_MORE}"]


def _headline(report: Report) -> str:
    facts = report.facts
    where = "CPU" if report.arch == "cpu" else report.arch
    where += " (emulated)" if facts.emulated else ""
    if facts.moved_to is not None:
        return f"{where}: its weights are on {facts.moved_to} now; call rocm_sd.optimize(pipe) again"
    replaced, count = count_replaced(report.changes)
    counted = f"{replaced} of {count} modules replaced" if count else "no module replaced"
    # Before the first picture is measured stock runs, whatever could be captured by then: encoders, say.
    waits = {plan.source for plan in facts.plans} == {WAITS} and not any(
        one.count or one.replays for one in facts.graphs
    )
    graphs = "" if waits else _graphs_in_words(facts.graphs)
    if replaced or graphs:
        on_a_cpu = ", whose ops are stock PyTorch here" if facts.stock_ops and replaced and not graphs else ""
        return f"{where}: {counted}{on_a_cpu}{graphs}"
    if any(_in_force(facts.approximated)):
        return f"{where}: running stock PyTorch with approximations; {counted}"
    if facts.level == "memory":
        return f"{where}: running stock PyTorch in less memory; {counted}"
    if report.arch == "cpu" and facts.idle_gpu is not None:
        return f"{where}: running stock PyTorch, though {facts.idle_gpu}"
    return f"{where}: running stock PyTorch{_why_stock(report, count)}; {counted}"


def count_replaced(changes: Iterable[Change]) -> tuple[int, int]:
    """How many are replaced, of how many that a rule looked at: several rules may look at one."""
    by_path: dict[str, bool] = {}
    for change in changes:
        by_path[change.path] = by_path.get(change.path, False) or change.replaced
    return sum(by_path.values()), len(by_path)


def _why_stock(report: Report, count: int) -> str:
    facts = report.facts
    if report.arch == "cpu":
        return ", as expected"
    if not facts.known:
        return ", because rocm-sd does not know this GPU"
    sources = {plan.source for plan in facts.plans}
    if sources == {WAITS}:
        return " until its first picture is measured here"
    if sources == {MEASURED} and all(plan.times is None for plan in facts.plans):
        return ", the fastest when it was measured here"
    return "" if count else ", because no rule is for its modules"


def _graphs_in_words(graphs: Sequence[Graphs]) -> str:
    replayed = list(dict.fromkeys(_name(one.model) for one in graphs if one.replays))
    captured = list(dict.fromkeys(_name(one.model) for one in graphs if one.count and not one.replays))
    said = []
    if len(replayed) + len(captured) > _MOST_NAMED:
        said = [f"{len(replayed)} of {len(graphs)} models replayed as graphs"]
    elif replayed or captured:
        done = [f"{_listed(names)} {what}" for names, what in ((replayed, "replayed"), (captured, "captured")) if names]
        said = [f"{' and '.join(done)} as {'a graph' if len(replayed) + len(captured) == 1 else 'graphs'}"]
    if not said and any(not one.why_none for one in graphs):
        said = ["no graph captured yet"]
    return "".join(f", {each}" for each in said)


def _trouble(report: Report) -> Iterator[str]:
    """What runs otherwise than it was meant to."""
    facts = report.facts
    if facts.fell_back:
        yield _with_reasons("Fallback since optimize", facts.fell_back)
    if facts.why_no_graphs is not None:
        yield f"Graphs: none, because {facts.why_no_graphs}"
    for one in (one for one in facts.graphs if one.why_none):
        had = "some calls had none" if one.count or one.replays else "none"
        further = f"; {_counted(len(one.why_none) - 1, 'other reason')}" if len(one.why_none) > 1 else ""
        said = f"Graphs of the {_name(one.model)}: {had}, because "
        yield said + _shortened(_without_name(one), WIDTH - len(said) - len(further)) + further


def _without_name(graphs: Graphs) -> str:
    return graphs.why_none[0].removeprefix(f"{graphs.model}: ")


def _level_and_quality(report: Report) -> Iterator[str]:
    facts, quality = report.facts, _quality(report)
    level = f"level {report.level}" + (f" ({facts.level} here)" if report.level == "auto" else "")
    if facts.level == "memory" and quality == _EXACT:
        yield f"{level.capitalize()}: {facts.does}; quality exact"
    elif facts.level == "memory":
        yield f"{level.capitalize()}: {facts.does}"
        yield quality
    else:
        both = f"{quality}; {level}"
        yield both if len(both) <= WIDTH else quality


def _quality(report: Report) -> str:
    facts, asked = report.facts, report.quality if isinstance(report.quality, str) else "as given"
    in_force = list(_in_force(facts.approximated))
    if in_force:
        what = ", ".join(dict.fromkeys(one.what for one in in_force))
        cost = next((one.cost for one in in_force if one.cost), facts.cost)
        return f"Quality {asked}: approximates {what}; {f'{cost} to exact' if cost else 'its cost is not measured'}"
    if asked == "exact":
        return _EXACT
    so_far = next((one.why_exact for one in facts.approximated if one.why_exact), None)
    if so_far is not None:
        return f"Quality {asked}: exact so far, because {so_far}"
    reason, _, cure = next(iter(report.approximations), "it leaves nothing out").partition("; type: ")
    if cure:
        # A command is never cut off.
        said = f"Quality {asked}: exact until you type: {cure}"
        return said if len(said) <= WIDTH else f"Exact until you type: {cure}"
    return f"Quality {asked}: exact, because {_without_kind(reason)}"


def _without_kind(note: str) -> str:
    """Of a note such as "UNet2DConditionModel is exact: nothing was measured", what follows the words of the line."""
    before, _, after = note.partition(" is exact: ")
    return after if after and " " not in before else note


def _plans(report: Report) -> Iterator[str]:
    facts = report.facts
    measured = [plan for plan in facts.plans if plan.source == MEASURED]
    waiting = [_name(plan.model) for plan in facts.plans if plan.source == WAITS]
    if measured:
        when = max(plan.when for plan in measured)
        each = [f"{_name(p.model)} {'as stock' if p.times is None else f'{p.times:.2f}x stock'}" for p in measured]
        said = f"Plan: measured here on {when}: {', '.join(each)}"
        yield said + (f"; {_listed(waiting)} to be measured" if waiting else "")
        return
    if waiting:
        yield f"Plan: none yet; {_listed(waiting)} measured here at the first picture"
        return
    shipped = [plan for plan in facts.plans if plan.source == SHIPPED]
    if shipped and report.arch != "cpu":
        why = next((plan.why for plan in shipped if plan.why), None)
        timed = f"timed on {report.arch}" if facts.timed else "not timed on any card; type: rocm-sd tune"
        yield f"Plan: the shipped data's, {timed}" if why is None else f"Plan: the shipped data's, since {why}"


def _skipped(report: Report) -> Iterator[str]:
    """Of those that were never replaced."""
    since = {change.path for change in report.facts.fell_back}
    replaced = {change.path for change in report.replaced}
    skipped = [change for change in report.skipped if change.path not in since | replaced]
    if skipped:
        yield _with_reasons("Skipped", skipped)


def _with_reasons(what: str, changes: Sequence[Change]) -> str:
    """How many modules, the reason of most of them, once, and how many others there are."""
    by_path = {change.path: change.why_skipped or "" for change in changes}
    (most, _), *others = Counter(by_path.values()).most_common()
    further = f"; {_counted(len(others), 'other reason')}" if others else ""
    said = f"{what}: {_counted(len(by_path), 'module')}, because "
    return said + _shortened(most, WIDTH - len(said) - len(further)) + further


def _in_force(approximated: Iterable[Approximated]) -> Iterator[Approximated]:
    return (one for one in approximated if one.why_exact is None)


def _name(model: str) -> str:
    if model.endswith("Transformer2DModel"):
        return "transformer"
    return "ControlNet" if "ControlNet" in model else _NAMES.get(model, model)


def _listed(names: Sequence[str]) -> str:
    several = list(dict.fromkeys(names))
    return several[0] if len(several) == 1 else f"{', '.join(several[:-1])} and {several[-1]}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _fitting(line: str) -> str:
    return _shortened(line, WIDTH)


def _shortened(text: str, room: int) -> str:
    """At a space: names with hyphens stay whole."""
    text = " ".join(text.split())
    return text if len(text) <= room else f"{text[: room - 3].rpartition(' ')[0]} ..."

"""The first thing on the page: who won, how sure that is, and who is worse off; of a single run its numbers."""

from __future__ import annotations

from html import escape

from perfed.engine.metrics import metric_of
from perfed.methods.titles import display_name
from perfed.plugins import POOLED
from perfed.report.against import MethodVerdict, average_sent_bytes
from perfed.report.intervals import FEWEST_SEEDS
from perfed.report.page.html import HINTS, details, named, note, paragraph, section
from perfed.report.page.page_data import Study
from perfed.report.run_results import RunResults
from perfed.report.text import axis_title, format_amount, format_megabytes, format_metric, format_short, join_names
from perfed.report.verdict import Verdict

MOST_NAMED = 4  # of the methods that are better, in the headline


def verdict_section(study: Study) -> str:
    """The verdict of a comparison; of one method cards with its metrics; nothing where no run is finished."""
    found = study.found
    if found is None:
        return "".join(_cards_of(study, method) for method in study.methods if len(study.methods) == 1)
    warned = "".join(f"<li>{escape(text)}</li>" for text in found.warnings)
    plain = [text for text in found.sentences if text not in found.warnings]
    best = found.best_method
    return section(
        "verdict",
        "Verdict",
        paragraph(headline(found), "headline"),
        _cards(study, found, best) if best else "",
        *map(paragraph, plain),
        f'<ul class="warn">{warned}</ul>' if warned else "",
        _glossary(),
    )


def headline(found: Verdict) -> str:
    """One sentence without numbers, which the cards below it have."""
    base, best = display_name(found.reference), found.best_method
    ahead = [of for of in found.methods if of.runs and of.gain.sign > 0 and not of.method.startswith(POOLED)]
    if best is None or not ahead:
        return f"No method is significantly better than {base}."
    if len(ahead) > MOST_NAMED:
        return f"{display_name(best.method)} is the best of {len(ahead)} methods that are better than {base}."
    others = [display_name(of.method) for of in ahead if of is not best]
    also = f", and so {'is' if len(others) == 1 else 'are'} {join_names(others)}" if others else ""
    return f"{display_name(best.method)} is better than {base}{also}."


def _card(head: str, strong: str, *below: str) -> str:
    inside = "".join(f"<p>{text}</p>" for text in below if text)
    return f'<div class="card"><h3>{escape(head)}</h3><strong>{strong}</strong>{inside}</div>'


def _cards(study: Study, found: Verdict, best: MethodVerdict) -> str:
    gain, metric, base = best.gain, found.metric, display_name(found.reference)
    step = f"{format_amount(metric, abs(gain.mean))} {'ahead of' if gain.mean >= 0 else 'behind'} {base}"
    if gain.sign > 0:
        who = _card("Which method won?", named(best.method, study.looks), escape(step), _second(found, best))
    else:
        who = _card("Which method won?", "none", f"{named(best.method, study.looks)}, the closest, is {escape(step)}")
    chance = "not known" if gain.low is None else "probably not" if gain.sign else "it can"
    sure = _card("Can it be chance?", chance, *map(escape, _doubts(found, best)))
    losing = found.losing_sites
    who_loses = f"{best.worse} of {best.runs} client-runs" if losing is None else f"{losing[0]} of {losing[1]} clients"
    bar = share(best.worse, best.equal, best.better)
    hurt = _card("Who is worse off?", who_loses, bar, *map(escape, found.worse_off))
    return f'<div class="cards">{who}{sure}{hurt}</div>'


def _second(found: Verdict, best: MethodVerdict) -> str:
    """How far the next method is behind, or ahead where that may be chance; empty where the reference is the next."""
    others = [v for v in found.methods if v is not best and v.runs and not v.method.startswith(POOLED)]
    second = max(others, key=lambda v: v.gain.mean, default=best)
    if second is best or second.gain.mean <= 0:
        return ""
    lead = best.gain.mean - second.gain.mean
    if lead < 0:
        return escape(
            f"{display_name(second.method)} is {format_amount(found.metric, -lead)} ahead of it, which may be chance"
        )
    return escape(f"{format_amount(found.metric, lead)} ahead of the second, {display_name(second.method)}")


def _doubts(found: Verdict, best: MethodVerdict) -> list[str]:
    """The interval, and what speaks against relying on it."""
    gain, metric, lines = best.gain, found.metric, ["no interval"]
    if gain.low is not None and gain.high is not None:
        ends = f"{format_short(metric, gain.low, '+')} to {format_short(metric, gain.high, '+')}"
        lines = [f"95 % interval {ends}, {'without' if gain.sign else 'with'} 0 in it"]
    if best.seeds < FEWEST_SEEDS:
        lines.append(f"only {best.seeds} seed{'s' if best.seeds > 1 else ''} (repetitions): see the remark on seeds")
    if any(warning.startswith(f"{display_name(best.method)} has not converged") for warning in found.warnings):
        lines.append("it was still learning when it stopped")
    return lines


def share(worse: int, equal: int, better: int) -> str:
    """A bar of the parts for which a method is worse, equal and better."""
    each = zip(("worse", "equal", "better"), (worse, equal, better), strict=True)
    words = f"worse for {worse}, equal for {equal}, better for {better}"
    parts = "".join(f'<i class="{kind}" style="--part:{count}"></i>' for kind, count in each)
    return f'<span class="share" role="img" aria-label="{words}" title="{words}">{parts}</span>'


def _glossary() -> str:
    words = "".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in HINTS.items())
    return details("What the words mean", f"<dl>{words}</dl>")


def _cards_of(study: Study, method: str) -> str:
    """Metrics of the only method, each over the clients, averaged over the seeds."""
    runs = [run for run in study.members(method) if run.summary]
    names = dict.fromkeys(name for run in runs if run.summary for name in run.summary.spreads)
    cards = "".join(_metric_card(name, runs) for name in names)
    if not cards:
        return ""
    size, seconds = average_sent_bytes(runs, method), [run.summary.wall_seconds for run in runs if run.summary]
    cards += _card("Wall time", f"{sum(seconds) / len(seconds):.1f} s", "with evaluations")
    cards += "" if size is None else _card("Sent", format_megabytes(size), "up and down, all clients and rounds")
    several = f", averaged over {len(runs)} seeds" if len(runs) > 1 else ""
    told = note(f"Means and worst clients of {display_name(method)}{several}. There is nothing to compare it with.")
    return section("verdict", "Result", f'<div class="cards">{cards}</div>', told, _glossary())


def _metric_card(metric: str, runs: list[RunResults]) -> str:
    known = metric_of(metric)
    spreads = [run.summary.spreads[metric] for run in runs if run.summary and metric in run.summary.spreads]

    def mean(name: str) -> str:
        values = [value for of in spreads if (value := getattr(of, name)) is not None]
        return format_metric(metric, sum(values) / len(values)) if values else "not known"

    worst = f"worst client {mean(known.worst)}, 10 % worst {mean(known.tenth_worst)}"
    lower = "" if known.higher_is_better else "lower is better"
    return _card(axis_title(metric), mean("mean"), f"± {mean('std')} over the clients", worst, lower)

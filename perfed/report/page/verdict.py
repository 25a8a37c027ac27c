"""The first section of the page: the verdict of a comparison, or the metrics of a single method."""

from __future__ import annotations

from html import escape

from perfed.engine.metrics import metric_of
from perfed.methods.titles import display_name
from perfed.plugins import POOLED
from perfed.report.against import MethodVerdict, average_sent_bytes
from perfed.report.intervals import FEWEST_SEEDS
from perfed.report.page.html import HINTS, build_details, build_note, build_paragraph, build_section, label_method
from perfed.report.page.page_data import ReportData
from perfed.report.run_results import RunResults
from perfed.report.text import axis_title, format_amount, format_megabytes, format_metric, format_short, join_names
from perfed.report.verdict import Verdict

MOST_NAMED = 4  # methods that the headline names


def verdict_section(report: ReportData) -> str:
    """Return the verdict of a comparison, or the metrics of a single method; empty if no run has finished."""
    verdict = report.verdict
    if verdict is None:
        return _single_method_section(report, report.methods[0]) if len(report.methods) == 1 else ""
    warning_items = "".join(f"<li>{escape(text)}</li>" for text in verdict.warnings)
    sentences = [text for text in verdict.sentences if text not in verdict.warnings]
    best = verdict.best_method
    return build_section(
        "verdict",
        "Verdict",
        build_paragraph(write_headline(verdict), "headline"),
        _build_verdict_cards(report, verdict, best) if best else "",
        *map(build_paragraph, sentences),
        f'<ul class="warn">{warning_items}</ul>' if warning_items else "",
        _build_glossary(),
    )


def write_headline(verdict: Verdict) -> str:
    """Return a sentence on the methods ahead of the reference, without numbers, which the cards below it have."""
    base, best = display_name(verdict.reference), verdict.best_method
    ahead = [v for v in verdict.methods if v.runs and v.gain.sign > 0 and not v.method.startswith(POOLED)]
    if best is None or not ahead:
        return f"No method is significantly better than {base}."
    if len(ahead) > MOST_NAMED:
        return f"{display_name(best.method)} is the best of {len(ahead)} methods that are better than {base}."
    other_names = [display_name(v.method) for v in ahead if v is not best]
    also = f", and so {'is' if len(other_names) == 1 else 'are'} {join_names(other_names)}" if other_names else ""
    return f"{display_name(best.method)} is better than {base}{also}."


def _build_card(head: str, strong: str, *paragraphs: str) -> str:
    inside = "".join(f"<p>{text}</p>" for text in paragraphs if text)
    return f'<div class="card"><h3>{escape(head)}</h3><strong>{strong}</strong>{inside}</div>'


def _build_verdict_cards(report: ReportData, verdict: Verdict, best: MethodVerdict) -> str:
    """Return three cards: the best method, the significance of its gain, and the clients that are worse off."""
    gain, metric, base = best.gain, verdict.metric, display_name(verdict.reference)
    best_name = label_method(best.method, report.looks)
    difference = f"{format_amount(metric, abs(gain.mean))} {'ahead of' if gain.mean >= 0 else 'behind'} {base}"
    if gain.sign > 0:
        answer, details = best_name, [escape(difference), _describe_second(verdict, best)]
    else:
        answer, details = "none", [f"the closest is {best_name}, {escape(difference)}"]
    best_card = _build_card("Which method is best?", answer, *details)
    significance = "not known" if gain.low is None else "yes" if gain.sign else "no"
    evidence = map(escape, _describe_evidence(verdict, best))
    significance_card = _build_card("Is the difference significant?", significance, *evidence)
    losing = verdict.losing_sites
    losers = f"{best.worse} of {best.runs} client-runs" if losing is None else f"{losing[0]} of {losing[1]} clients"
    bar = draw_shares(best.worse, best.equal, best.better)
    losers_card = _build_card("Who is worse off?", losers, bar, *map(escape, verdict.worse_off))
    return f'<div class="cards">{best_card}{significance_card}{losers_card}</div>'


def _describe_second(verdict: Verdict, best: MethodVerdict) -> str:
    """Return the distance of the best method to the one with the next largest mean gain, as text.

    That method is ahead if its gain is larger, but not significant. It is empty if no other method is ahead of the
    reference.
    """
    candidates = [v for v in verdict.methods if v is not best and v.runs and not v.method.startswith(POOLED)]
    second = max(candidates, key=lambda v: v.gain.mean, default=best)
    if second is best or second.gain.mean <= 0:
        return ""
    lead = best.gain.mean - second.gain.mean
    if lead < 0:
        step = format_amount(verdict.metric, -lead)
        return escape(f"{display_name(second.method)} is {step} ahead of it, but its gain is not significant")
    return escape(f"{format_amount(verdict.metric, lead)} ahead of the second best, {display_name(second.method)}")


def _describe_evidence(verdict: Verdict, best: MethodVerdict) -> list[str]:
    """Return lines on the interval of the gain, and on reasons not to rely on it."""
    gain, metric, lines = best.gain, verdict.metric, ["no interval"]
    if gain.low is not None and gain.high is not None:
        ends = f"{format_short(metric, gain.low, '+')} to {format_short(metric, gain.high, '+')}"
        lines = [f"95 % interval {ends}, which {'excludes' if gain.sign else 'includes'} 0"]
    if best.seeds < FEWEST_SEEDS:
        lines.append(f"only {best.seeds} seed{'s' if best.seeds > 1 else ''}: see the warning about seeds")
    if any(warning.startswith(f"{display_name(best.method)} has not converged") for warning in verdict.warnings):
        lines.append("training had not converged")
    return lines


def draw_shares(worse: int, equal: int, better: int) -> str:
    """Return a bar that shows for how many client-runs a method is worse, equal and better."""
    counts = zip(("worse", "equal", "better"), (worse, equal, better), strict=True)
    label = f"worse for {worse}, equal for {equal}, better for {better}"
    parts = "".join(f'<i class="{kind}" style="--part:{count}"></i>' for kind, count in counts)
    return f'<span class="share" role="img" aria-label="{label}" title="{label}">{parts}</span>'


def _build_glossary() -> str:
    entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in HINTS.items())
    return build_details("Glossary", f"<dl>{entries}</dl>")


def _single_method_section(report: ReportData, method: str) -> str:
    """Return cards with the metrics of the only method, averaged over the seeds; empty if nothing was measured."""
    runs = [run for run in report.members(method) if run.summary]
    names = dict.fromkeys(name for run in runs if run.summary for name in run.summary.spreads)
    cards = "".join(_metric_card(name, runs) for name in names)
    if not cards:
        return ""
    size, seconds = average_sent_bytes(runs, method), [run.summary.wall_seconds for run in runs if run.summary]
    cards += _build_card("Wall time", f"{sum(seconds) / len(seconds):.1f} s", "with evaluations")
    cards += "" if size is None else _build_card("Sent", format_megabytes(size), "up and down, all clients and rounds")
    several = f", averaged over {len(runs)} seeds" if len(runs) > 1 else ""
    explanation = build_note(
        f"Means and worst clients of {display_name(method)}{several}. There is no other method to compare with."
    )
    return build_section("verdict", "Result", f'<div class="cards">{cards}</div>', explanation, _build_glossary())


def _metric_card(metric: str, runs: list[RunResults]) -> str:
    metric_spec = metric_of(metric)
    spreads = [run.summary.spreads[metric] for run in runs if run.summary and metric in run.summary.spreads]

    def format_mean(name: str) -> str:
        values = [value for spread in spreads if (value := getattr(spread, name)) is not None]
        return format_metric(metric, sum(values) / len(values)) if values else "not known"

    worst = f"worst client {format_mean(metric_spec.worst)}, 10 % worst {format_mean(metric_spec.tenth_worst)}"
    lower = "" if metric_spec.higher_is_better else "lower is better"
    return _build_card(
        axis_title(metric), format_mean("mean"), f"± {format_mean('std')} over the clients", worst, lower
    )

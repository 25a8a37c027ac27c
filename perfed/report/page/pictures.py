"""What a family of methods has a picture of: embedded samples (FLIC), combined heads (FedPAC, FedAMP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from perfed.errors import PerfedError
from perfed.methods.titles import display_name
from perfed.report.page import svg
from perfed.report.page.heat import draw_cells, draw_colour_scale, draw_row_names
from perfed.report.page.html import (
    build_grid,
    build_note,
    build_section,
    build_select,
    build_slider,
    build_switched_panels,
    wrap_figure,
)
from perfed.report.page.page_data import ReportData, method_file_name, spread_indices
from perfed.report.page.style import css_colour, cycle_colour
from perfed.report.run_results import RunResults
from perfed.report.snapshots import (
    MAX_SAMPLES,
    Combination,
    PlacedSamples,
    load_combination,
    load_snapshot,
    place_samples,
)

MOST_PANELS = 3  # rounds of embedded samples or combined heads per method, beside each other
MOST_STEPS = 40  # rounds of combined heads per method
SIDE = 300.0  # of an embedding's square
READ_EMBEDDING = (
    "a dot is a sample, its colour and number its class, a diamond an anchor, where a method aligns the clients to "
    "some. Neighbours mean something; positions and distances between panels do not."
)
READ_COMBINATION = (
    "Row: a client; column: whose head (FedAMP: model) its own was made of. The stronger the colour, the more. "
    "Blocks are clients that found each other alike."
)
_SPLITS = {"train": "training", "test": "test"}


def embedding_section(report: ReportData) -> str:
    """t-SNE of the samples that runs kept, per method through training; those that align to anchors first."""
    firsts = _first(report, lambda run: bool(run.list_arrays("snapshots")))
    if not firsts:
        return ""
    panels, lines, anchored = {}, [], {}
    for method, run in firsts.items():
        try:
            drawn = list(_embeddings(run))
        except PerfedError as error:
            lines.append(build_note(f"Left out: {error}"))
            continue
        anchored[method] = any(len(found.anchors) for found, _ in drawn)
        panels[method] = build_grid(*(wrap_figure(picture) for _, picture in drawn), small=True)
    ordered = sorted(panels, key=lambda method: not anchored[method])
    splits = " or ".join(sorted({_SPLITS[firsts[method].snapshot_split] for method in panels}))
    told = f"t-SNE of at most {MAX_SAMPLES} {splits} samples of the first seed: {READ_EMBEDDING}"
    return build_section(
        "embedding",
        "Embedded samples",
        build_switched_panels(
            [build_select("embedding", "Method", {m: display_name(m) for m in ordered})],
            panels,
            next(iter(ordered), None),
        ),
        build_note(told if panels else ""),
        *lines,
    )


def _first(report: ReportData, has: Callable[[RunResults], bool]) -> dict[str, RunResults]:
    """The first run of each method that has something."""
    found = {m: next((run for run in report.members(m) if has(run)), None) for m in report.methods}
    return {method: run for method, run in found.items() if run is not None}


def _embeddings(run: RunResults) -> Iterator[tuple[PlacedSamples, str]]:
    files = run.list_arrays("snapshots")
    for i in spread_indices(len(files), MOST_PANELS):
        found = place_samples(load_snapshot(files[i]))
        if found is not None:
            yield found, _embedding(run.method, found)


def _embedding(method: str, of: PlacedSamples) -> str:
    """Samples as dots in the colours of their classes, anchors as diamonds."""
    where = f"{display_name(method)}, {f'round {of.round}' if of.round else 'before round 1'}"
    everything = np.concatenate([of.points, of.anchors])
    low, high = everything.min(0), everything.max(0)
    x, y = (svg.Scale(low[k], max(high[k], low[k] + 1e-9), *ends) for k, ends in ((0, (14, 466)), (1, (SIDE, 36))))
    classes = sorted({*of.y.tolist(), *of.anchor_classes.tolist()})
    parts = [svg.draw_text(4, 14, where, font_weight="bold")]
    for label in classes:
        own = [(x(a), y(b)) for a, b in of.points[of.y == label]]
        if own:
            hint = svg.build_tooltip(f"class {label}: {len(own)} samples")
            parts.append(svg.build_element("g", hint, svg.draw_dots(own, cycle_colour(label), r=3), opacity=0.75))
    for label, (a, b) in zip(of.anchor_classes.tolist(), of.anchors, strict=True):
        d = f"M{x(a):.1f} {y(b) - 8:.1f}l7 8l-7 8l-7 -8z"
        parts.append(
            svg.build_element(
                "path",
                svg.build_tooltip(f"anchor of class {label}"),
                d=d,
                fill=cycle_colour(label),
                stroke=css_colour("ink"),
            )
        )
    parts += _names(of, classes, x, y)
    told = f"{len(of.points)} samples of {len(classes)} classes, {len(of.anchors)} anchors"
    return svg.build_drawing(f"Embedded samples: {where}", told, *parts, height=SIDE + 14)


def _names(of: PlacedSamples, classes: Sequence[int], x: svg.Scale, y: svg.Scale) -> list[str]:
    """The numbers of the classes, above their anchors or in their middle, each on a ground of its own."""
    grounds, numbers = [], []
    for label in classes:
        anchor = of.anchors[of.anchor_classes == label]
        a, b = anchor[0] if len(anchor) else np.median(of.points[of.y == label], axis=0)
        place = {"text_anchor": "middle", "font_weight": "bold", "font_size": 14}
        wide = 10.0 * len(str(label))
        ground = {"x": x(a) - wide / 2, "y": y(b) - 23.0, "width": wide, "height": 12.0, "rx": 2}
        grounds.append(svg.build_element("rect", **ground, fill=css_colour("paper"), fill_opacity=0.8))
        numbers.append(svg.draw_text(x(a), y(b) - 12, str(label), **place))
    return [*grounds, *numbers]


def combination_section(report: ReportData) -> str:
    """Weights with which a method combined the clients' heads, as a heat map; of many rounds, with a slider."""
    parts: list[str] = []
    lines: list[str] = []
    for method, run in _first(report, lambda run: bool(run.list_arrays("combination"))).items():
        try:
            files = run.list_arrays("combination")
            rounds = [load_combination(files[i]) for i in spread_indices(len(files), MOST_STEPS)]
        except PerfedError as error:
            lines.append(build_note(f"Left out: {error}"))
            continue
        top = max(float(one.weights.max()) for one in rounds) or 1.0
        panels = {str(one.round): wrap_figure(_heat_map(method, one, top)) for one in rounds}
        if len(rounds) <= MOST_PANELS:
            parts += panels.values()
            continue
        steps = build_slider("round", f"{display_name(method)}, seed {run.seed}: round", [one.round for one in rounds])
        parts.append(f"<div>{build_switched_panels([steps], panels, next(reversed(panels)))}</div>")
    return build_section(
        "combination", "Who learns from whom", build_grid(*parts), build_note(READ_COMBINATION if parts else ""), *lines
    )


def _heat_map(method: str, of: Combination, top: float) -> str:
    """The weights as a square, rows with those they are most of."""
    box = (66.0, 44.0, 300.0, 300.0)

    def hint(row: int) -> str:
        best = np.argsort(of.weights[row], kind="stable")[::-1][:3]
        return f"client {of.clients[row]}: most from " + ", ".join(
            f"{of.clients[j]} ({of.weights[row, j]:.2f})" for j in best
        )

    heads = [
        svg.draw_text(66, 34, "whose head", fill=css_colour("muted")),
        svg.draw_text(4, 34, "client", fill=css_colour("muted")),
    ]
    title = f"{display_name(method)}: weights of the combination, round {of.round}"
    parts = [svg.draw_text(4, 14, title, font_weight="bold"), *heads, *draw_cells(of.weights, box, top, hint)]
    told = f"{len(of.clients)} clients; the largest weight is {of.weights.max():.2f}"
    return svg.build_drawing(
        title, told, *parts, *draw_row_names(of.clients, box), *draw_colour_scale(388, 44, top), height=356
    )


def picture_figures(report: ReportData) -> dict[str, str]:
    """By name: embedded samples in the last round kept, weights of up to three combinations; none of broken files."""
    found: dict[str, str] = {}
    for method, run in _first(report, lambda run: bool(run.list_arrays("snapshots"))).items():
        with suppress(PerfedError):
            last = place_samples(load_snapshot(run.list_arrays("snapshots")[-1]))
            found |= {f"embedding-{method_file_name(method)}": _embedding(method, last)} if last else {}
    for method, run in _first(report, lambda run: bool(run.list_arrays("combination"))).items():
        with suppress(PerfedError):
            files = run.list_arrays("combination")
            rounds = [load_combination(files[i]) for i in spread_indices(len(files), MOST_PANELS)]
            top = max(float(one.weights.max()) for one in rounds) or 1.0
            for one in rounds:
                found[f"combination-{method_file_name(method)}-round-{one.round}"] = _heat_map(method, one, top)
    return found

"""Sections for families of methods: embedded samples (FLIC) and combination weights (FedPAC, FedAMP)."""

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
SIDE = 300.0  # height of an embedding
READ_EMBEDDING = (
    "a dot is a sample, its colour and number are its class; a diamond is an anchor to which a method aligns the "
    "clients. Only neighbourhoods can be interpreted; positions and distances between panels cannot."
)
READ_COMBINATION = (
    "A row is a client, a column the client whose head (FedAMP: model) was combined into its own. A stronger colour "
    "means a larger weight. Blocks are groups of similar clients."
)
_SPLITS = {"train": "training", "test": "test"}


def embedding_section(report: ReportData) -> str:
    """Return t-SNE figures of the kept samples during training by method; methods with anchors come first."""
    firsts = _select_first_runs(report, lambda run: bool(run.list_arrays("snapshots")))
    if not firsts:
        return ""
    panels, notes, anchored = {}, [], {}
    for method, run in firsts.items():
        try:
            pictures = list(_draw_embeddings(run))
        except PerfedError as error:
            notes.append(build_note(f"Left out: {error}"))
            continue
        anchored[method] = any(len(samples.anchors) for samples, _ in pictures)
        panels[method] = build_grid(*(wrap_figure(picture) for _, picture in pictures), small=True)
    ordered = sorted(panels, key=lambda method: not anchored[method])
    splits = " or ".join(sorted({_SPLITS[firsts[method].snapshot_split] for method in panels}))
    description = f"t-SNE of at most {MAX_SAMPLES} {splits} samples of the first seed: {READ_EMBEDDING}"
    return build_section(
        "embedding",
        "Embedded samples",
        build_switched_panels(
            [build_select("embedding", "Method", {m: display_name(m) for m in ordered})],
            panels,
            next(iter(ordered), None),
        ),
        build_note(description if panels else ""),
        *notes,
    )


def _select_first_runs(report: ReportData, has: Callable[[RunResults], bool]) -> dict[str, RunResults]:
    """Return the first run of each method for which ``has`` is true."""
    first_runs = {m: next((run for run in report.members(m) if has(run)), None) for m in report.methods}
    return {method: run for method, run in first_runs.items() if run is not None}


def _draw_embeddings(run: RunResults) -> Iterator[tuple[PlacedSamples, str]]:
    files = run.list_arrays("snapshots")
    for i in spread_indices(len(files), MOST_PANELS):
        samples = place_samples(load_snapshot(files[i]))
        if samples is not None:
            yield samples, _draw_embedding(run.method, samples)


def _draw_embedding(method: str, samples: PlacedSamples) -> str:
    """Return a figure with samples as dots in the colours of their classes, and anchors as diamonds."""
    where = f"{display_name(method)}, {f'round {samples.round}' if samples.round else 'before round 1'}"
    everything = np.concatenate([samples.points, samples.anchors])
    low, high = everything.min(0), everything.max(0)
    x, y = (svg.Scale(low[k], max(high[k], low[k] + 1e-9), *ends) for k, ends in ((0, (14, 466)), (1, (SIDE, 36))))
    classes = sorted({*samples.y.tolist(), *samples.anchor_classes.tolist()})
    parts = [svg.draw_text(4, 14, where, font_weight="bold")]
    for label in classes:
        points = [(x(a), y(b)) for a, b in samples.points[samples.y == label]]
        if points:
            hint = svg.build_tooltip(f"class {label}: {len(points)} samples")
            parts.append(svg.build_element("g", hint, svg.draw_dots(points, cycle_colour(label), r=3), opacity=0.75))
    for label, (a, b) in zip(samples.anchor_classes.tolist(), samples.anchors, strict=True):
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
    parts += _draw_class_numbers(samples, classes, x, y)
    description = f"{len(samples.points)} samples of {len(classes)} classes, {len(samples.anchors)} anchors"
    return svg.build_drawing(f"Embedded samples: {where}", description, *parts, height=SIDE + 14)


def _draw_class_numbers(samples: PlacedSamples, classes: Sequence[int], x: svg.Scale, y: svg.Scale) -> list[str]:
    """Return the numbers of the classes on pale backgrounds, above their anchors or at the median of their samples."""
    grounds, numbers = [], []
    for label in classes:
        anchor = samples.anchors[samples.anchor_classes == label]
        a, b = anchor[0] if len(anchor) else np.median(samples.points[samples.y == label], axis=0)
        place = {"text_anchor": "middle", "font_weight": "bold", "font_size": 14}
        wide = 10.0 * len(str(label))
        ground = {"x": x(a) - wide / 2, "y": y(b) - 23.0, "width": wide, "height": 12.0, "rx": 2}
        grounds.append(svg.build_element("rect", **ground, fill=css_colour("paper"), fill_opacity=0.8))
        numbers.append(svg.draw_text(x(a), y(b) - 12, str(label), **place))
    return [*grounds, *numbers]


def combination_section(report: ReportData) -> str:
    """Return heat maps of the weights with which methods combine the clients' heads; with a slider for many rounds."""
    parts: list[str] = []
    lines: list[str] = []
    for method, run in _select_first_runs(report, lambda run: bool(run.list_arrays("combination"))).items():
        try:
            files = run.list_arrays("combination")
            rounds = [load_combination(files[i]) for i in spread_indices(len(files), MOST_STEPS)]
        except PerfedError as error:
            lines.append(build_note(f"Left out: {error}"))
            continue
        top = max(float(combination.weights.max()) for combination in rounds) or 1.0
        panels = {
            str(combination.round): wrap_figure(_draw_weights(method, combination, top)) for combination in rounds
        }
        if len(rounds) <= MOST_PANELS:
            parts += panels.values()
            continue
        steps = build_slider(
            "round", f"{display_name(method)}, seed {run.seed}: round", [combination.round for combination in rounds]
        )
        parts.append(f"<div>{build_switched_panels([steps], panels, next(reversed(panels)))}</div>")
    return build_section(
        "combination", "Who learns from whom", build_grid(*parts), build_note(READ_COMBINATION if parts else ""), *lines
    )


def _draw_weights(method: str, combination: Combination, top: float) -> str:
    """Return a heat map of the weights; the tooltip of a row names the clients with the largest weights."""
    box = (66.0, 44.0, 300.0, 300.0)

    def hint(row: int) -> str:
        best = np.argsort(combination.weights[row], kind="stable")[::-1][:3]
        return f"client {combination.clients[row]}: most from " + ", ".join(
            f"{combination.clients[j]} ({combination.weights[row, j]:.2f})" for j in best
        )

    heads = [
        svg.draw_text(66, 34, "whose head", fill=css_colour("muted")),
        svg.draw_text(4, 34, "client", fill=css_colour("muted")),
    ]
    title = f"{display_name(method)}: weights of the combination, round {combination.round}"
    parts = [svg.draw_text(4, 14, title, font_weight="bold"), *heads, *draw_cells(combination.weights, box, top, hint)]
    description = f"{len(combination.clients)} clients; the largest weight is {combination.weights.max():.2f}"
    return svg.build_drawing(
        title,
        description,
        *parts,
        *draw_row_names(combination.clients, box),
        *draw_colour_scale(388, 44, top),
        height=356,
    )


def picture_figures(report: ReportData) -> dict[str, str]:
    """Return figures by name: embedded samples of the last round, and weights of up to three rounds.

    Damaged files are left out.
    """
    figures: dict[str, str] = {}
    for method, run in _select_first_runs(report, lambda run: bool(run.list_arrays("snapshots"))).items():
        with suppress(PerfedError):
            last = place_samples(load_snapshot(run.list_arrays("snapshots")[-1]))
            figures |= {f"embedding-{method_file_name(method)}": _draw_embedding(method, last)} if last else {}
    for method, run in _select_first_runs(report, lambda run: bool(run.list_arrays("combination"))).items():
        with suppress(PerfedError):
            files = run.list_arrays("combination")
            rounds = [load_combination(files[i]) for i in spread_indices(len(files), MOST_PANELS)]
            top = max(float(combination.weights.max()) for combination in rounds) or 1.0
            for combination in rounds:
                figures[f"combination-{method_file_name(method)}-round-{combination.round}"] = _draw_weights(
                    method, combination, top
                )
    return figures

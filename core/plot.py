"""Draws one figure of a sweep as an SVG: lines over a field of numbers, else bars. Needs no plotting package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import attrs

from core.report import FIGURES, Job, note, shorten, swept
from core.types import ConfigError

W, LEFT, TOP, PLOT_W, PLOT_H = 860, 90, 64, 540, 320
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart also by people who do not see all colours (after Okabe and Ito)."""
DASHES = ("", "7 5")
"""In turn, so that of two lines that coincide both are seen."""
GREY, INK = "#94a3b8", "#0f172a"
WIDE = 16
"""From this ratio of the largest x to the smallest the axis is logarithmic."""

Lines = Mapping[str, Sequence[tuple[float, float, Job]]]


@attrs.frozen
class Axis:
    """Maps values to pixels. ``log`` is for powers: 1, 8, 64."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((value - low) / (high - low) if high > low else 0.5)


def draw(jobs: Sequence[Job], figure: str, x: str | None = None) -> str:
    """The picture. ``figure`` is a key of the jobs' figures, ``x`` an override in which they differ.

    ConfigError when there is nothing to draw, or ``x`` is none of those.
    """
    drawn = [job for job in jobs if isinstance(job.figures.get(figure), int | float)]
    if not drawn:
        raise ConfigError(f"{figure}: no job of this sweep has a number there")
    differs = swept(jobs)
    if x is not None and x not in differs:
        raise ConfigError(f"--x {x}: the jobs do not differ in it; allowed: {', '.join(differs) or 'nothing'}")
    x = x or next((name for name in differs if _are_numbers(drawn, name)), None)
    if x is not None and _are_numbers(drawn, x):
        return _frame(_lines(drawn, figure, x, differs), figure, jobs, TOP + PLOT_H + 74)
    return _bars(drawn, figure, jobs, sorted(differs, key=lambda name: name != x))


def _are_numbers(jobs: Sequence[Job], name: str) -> bool:
    return all(_number(job.choices.get(name, "")) is not None for job in jobs)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _name(job: Job, differs: Sequence[str]) -> str:
    """What sets this job apart: ``sjf, paged``; fields keep their name: ``watermark=0.1``."""
    words = [(name.rpartition("."), job.choices.get(name, "-")) for name in differs]
    return ", ".join(f"{last}={value}" if dot else value for (_, dot, last), value in words)


# ------------------------------------------------------------------------------------------------ lines


def _lines(jobs: Sequence[Job], figure: str, x: str, differs: Sequence[str]) -> list[str]:
    """Axes, one line for each combination of what else differs, and the legend."""
    others = [name for name in differs if name != x]
    lines: dict[str, list[tuple[float, float, Job]]] = {}
    for job in jobs:
        lines.setdefault(_name(job, others), []).append((float(job.choices[x]), job.figures[figure], job))
    xs = sorted({point[0] for points in lines.values() for point in points})
    across = Axis(xs[0], xs[-1], LEFT + 14, LEFT + PLOT_W - 14, log=xs[0] > 0 and xs[-1] / xs[0] >= WIDE)
    out, up = _y_axis(jobs, figure)
    for value in xs:
        out.append(_text(across.at(value), TOP + PLOT_H + 20, f"{value:g}", anchor="middle"))
        out.append(f'<path d="M {across.at(value):.1f} {TOP + PLOT_H} v 5" stroke="{GREY}"/>')
    out.append(_text(LEFT + PLOT_W / 2, TOP + PLOT_H + 42, x, anchor="middle", weight="700"))
    for i, (name, points) in enumerate(lines.items()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]
        places = [(across.at(px), up.at(py), job) for px, py, job in sorted(points, key=lambda point: point[0])]
        path = " L ".join(f"{px:.1f} {py:.1f}" for px, py, _ in places)
        out.append(f'<path d="M {path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
        out += [_interval(px, figure, job, up, colour) for px, _, job in places if job.spread.get(figure)]
        for px, py, job in places:
            title = f"{name} {x}={job.choices[x]}: {shorten(figure, job)}"
            out.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{max(3, 6 - i)}" fill="{colour}"><title>{escape(title)}</title></circle>'
            )
        y = TOP + 10 + 20 * i
        out.append(
            f'<path d="M {LEFT + PLOT_W + 18} {y} h 24" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        out.append(_text(LEFT + PLOT_W + 48, y + 4, name or figure))
    return out


def _interval(x: float, figure: str, job: Job, up: Axis, colour: str) -> str:
    """The 95 % interval of merged jobs, as a vertical line within the frame."""
    low, high = (job.figures[figure] + sign * job.spread[figure] for sign in (-1, 1))
    low, high = max(low, up.low), min(high, up.high)
    return f'<path d="M {x:.1f} {up.at(low):.1f} V {up.at(high):.1f}" stroke="{colour}" stroke-width="1.5"/>'


def _y_axis(jobs: Sequence[Job], figure: str) -> tuple[list[str], Axis]:
    """From 0, so that heights compare; about five round steps, with the units of the table."""
    most = max(max(job.figures[figure] + job.spread.get(figure, 0) for job in jobs), 0) or 1
    least = min(0, *(job.figures[figure] for job in jobs))
    step = _round_step((most - least) / 5)
    top, bottom = math.ceil(most / step - 1e-9) * step, math.floor(least / step) * step
    up = Axis(bottom, top, TOP + PLOT_H, TOP)
    out = []
    for i in range(round((top - bottom) / step) + 1):
        value = bottom + i * step
        label = shorten(figure, attrs.evolve(jobs[0], figures={figure: value}, spread={}))
        out.append(f'<path d="M {LEFT} {up.at(value):.1f} h {PLOT_W}" stroke="{GREY}" stroke-opacity="0.4"/>')
        out.append(_text(LEFT - 8, up.at(value) + 4, label, anchor="end"))
    return out, up


def _round_step(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(round_ * power for round_ in (1, 2, 2.5, 5, 10) if round_ * power >= step * (1 - 1e-9))


# ------------------------------------------------------------------------------------------------ bars


def _bars(jobs: Sequence[Job], figure: str, all_jobs: Sequence[Job], differs: Sequence[str]) -> str:
    """A bar a job, with its figure at the end; the first of ``differs`` gives the colour."""
    kinds = list(dict.fromkeys(job.choices.get(differs[0], "-") for job in jobs)) if differs else [""]
    longest = max(max(job.figures[figure] for job in jobs), 0) or 1
    if differs:
        jobs = sorted(jobs, key=lambda job: kinds.index(job.choices.get(differs[0], "-")))
    names = [_name(job, differs) or f"job {job.number}" for job in jobs]
    left = min(360, 30 + 7 * max(map(len, names)))
    out = []
    for i, (name, job) in enumerate(zip(names, jobs)):
        y, length = TOP + 26 * i, max(0.0, (W - left - 110) * job.figures[figure] / longest)
        colour = COLOURS[kinds.index(job.choices.get(differs[0], "-") if differs else "") % len(COLOURS)]
        out.append(_text(left - 8, y + 14, name, anchor="end"))
        out.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="19" fill="{colour}" rx="2"/>')
        out.append(_text(left + length + 6, y + 14, shorten(figure, job)))
    return _frame(out, figure, all_jobs, TOP + 26 * len(jobs) + 34)


# ------------------------------------------------------------------------------------------------ around both


def _frame(inner: Sequence[str], figure: str, jobs: Sequence[Job], height: float) -> str:
    """Title, what the times are worth, and how many jobs have no point."""
    title = FIGURES.get(figure, figure)
    missing = sum(not isinstance(job.figures.get(figure), int | float) for job in jobs)
    below = note(jobs) + (f"; {missing} of {len(jobs)} jobs have no such figure" if missing else "")
    size = f'viewBox="0 0 {W} {round(height)}" width="{W}" height="{round(height)}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{W}" height="{round(height)}" fill="#ffffff"/>',
            _text(24, 32, title if title == figure else f"{title}  ({figure})", size=17, weight="700"),
            *inner,
            _text(24, height - 10, below, colour="#475569"),
            "</svg>\n",
        ]
    )


def _text(
    x: float, y: float, words: str, size: int = 13, colour: str = INK, weight: str = "400", anchor: str = "start"
) -> str:
    style = f'font-size="{size}" fill="{colour}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'

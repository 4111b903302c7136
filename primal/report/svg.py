"""Charts as inline SVG. Colours and type are the page's: see style.css.

A chart is drawn at the width of a phone and may be shown smaller or a little larger; so its type is
as large as the text around it, wherever it stands. Horizontal first: a point is (x, y).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from primal.report.html import Html, tag

Point = tuple[float, float]
WIDTH = 372  # of a chart, in CSS pixels
TEXT = 6.1  # width of a character of a chart's type, on average
MOST = 7  # tenths of a row from which a cell of a matrix is dark


@dataclass(frozen=True)
class Line:
    """A series to draw; a point whose y is NaN interrupts it."""

    name: str
    points: Sequence[Point]
    colour: str = "var(--a)"
    thin: bool = False
    dots: bool = False  # points alone
    label: str | None = None  # beside its last point


@dataclass(frozen=True)
class Axis:
    """Numbers along a side: ``at(value)`` is 0 at the low end and 1 at the high end."""

    low: float
    high: float
    log: bool = False
    percent: bool = False
    whole: bool = False  # only whole numbers mean anything
    step: float | None = None  # between ticks, where the ends were rounded to it

    def at(self, value: float) -> float:
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(max(value, self.low)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about ``count`` round numbers between the ends."""
        if self.log:
            return self._log_ticks(count)
        step = self.step or (self.high - self.low) / count
        step = _round_step(max(1.0, step), (1, 2, 5, 10)) if self.whole else _round_step(step)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]

    def _log_ticks(self, count: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        digits = (1, 2, 5) if self.high / self.low < 200 else (1,)
        ticks = [d * 10.0**e for e in range(first, last + 1) for d in digits]
        inside = [t for t in ticks if self.low / 1.0001 <= t <= self.high * 1.0001]
        # The largest is kept, and in steps those below it.
        return inside[::-1][:: max(1, math.ceil(len(inside) / (count + 2)))][::-1]

    def text(self, tick: float) -> str:
        if self.percent:
            return f"{100 * tick:.4g} %"
        if self.log and (tick < 0.001 or tick >= 10_000):
            exponent = math.floor(math.log10(tick) + 1e-9)
            digit = round(tick / 10.0**exponent)
            power = "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
            return power if digit == 1 else f"{digit}·{power}"
        return f"{tick:.6g}".replace("-", "−")


def fit_axis(
    values: Iterable[float],
    *,
    log: bool = False,
    percent: bool = False,
    zero: bool = False,
    steps: int = 5,
) -> Axis:
    """Return an axis that holds the values, with ends round to one of about ``steps`` steps."""
    finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not finite:
        return Axis(0.1, 1.0, log, percent) if log else Axis(0.0, 1.0, log, percent)
    low, high = min(finite), max(finite)
    if log:
        # Within a factor of 2.5 lies a 1, 2 or 5: the axis has a tick.
        margin = 1.08 * math.sqrt(max(1.0, 2.5 * low / high))
        return Axis(low / margin, high * margin, True, percent)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-12 * max(abs(high), 1.0):
        margin = abs(high) / 2 or 1.0
        low, high = low - margin, high + margin
    step = _round_step((high - low) / steps)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(low, min(high, 1.0) if percent else high, log, percent, step=step)


def figure(title: str, picture: Html, note: object = None) -> Html:
    """Put a title above a picture, and what must be known to read it."""
    caption = tag("figcaption", tag("b", title), None if note is None else tag("span", note))
    return tag("figure", caption, picture)


# --- lines ---------------------------------------------------------------------------------------


def line_chart(
    name: str,
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    x_title: str,
    mark: tuple[float, str] | None = None,
    height: int = 224,
) -> Html:
    """Draw lines over a grid; their labels stand where they end. ``mark`` is a vertical line."""
    labels = [line.label for line in lines if line.label]
    y_ticks = y.ticks()
    left = 10 + TEXT * max([len(y.text(t)) for t in y_ticks] or [1])
    right = 12 + TEXT * max([len(text) for text in labels] or [0])
    top, bottom = (22 if mark else 10), 36
    wide, high = WIDTH - left - right, height - top - bottom

    def place(point: Point) -> Point:
        return left + wide * x.at(point[0]), top + high * (1 - y.at(point[1]))

    parts = []
    for tick in y_ticks:
        level = place((x.low, tick))[1]
        parts.append(_straight(left, level, left + wide, level, "grid"))
        parts.append(_text(left - 6, level + 4, y.text(tick), "end"))
    for tick in x.ticks(7):
        across = place((tick, y.low))[0]
        parts.append(_straight(across, top + high, across, top + high + 4, "axis"))
        parts.append(_text(across, top + high + 16, x.text(tick), "middle"))
    parts.append(_straight(left, top + high, left + wide, top + high, "axis"))
    parts.append(_text(left + wide / 2, height - 4, x_title, "middle", class_="name"))
    if mark is not None:
        across = place((mark[0], y.low))[0]
        parts.append(_straight(across, top, across, top + high, "mark"))
        room = TEXT * len(mark[1]) / 2
        held = min(max(across, left + room), left + wide - room)
        parts.append(_text(held, top - 8, mark[1], "middle"))
    parts += [_polyline(line, place) for line in lines]
    parts += _end_labels(lines, place, left + wide + 7, top, top + high)
    return _svg(name, WIDTH, height, parts)


def _polyline(line: Line, place: Callable[[Point], Point]) -> Html:
    points = thin_out(line.points)
    alone = sum(math.isfinite(py) for _, py in points) == 1
    classes = "line" + " thin" * line.thin + " points" * (line.dots or alone)
    title = None if line.thin else tag("title", line.name)
    drawn = path(points, place, dots=line.dots)
    return tag("path", title, d=drawn, class_=classes, style=f"stroke:{line.colour}")


def _end_labels(
    lines: Sequence[Line], place: Callable[[Point], Point], x: float, top: float, bottom: float
) -> list[Html]:
    """Write each label at the height where its line ends, moved apart where they would touch."""
    wanted = []
    for line in lines:
        ends = [point for point in line.points if math.isfinite(point[1])]
        if line.label and ends:
            wanted.append((place(ends[-1])[1], line.label, line.colour))
    wanted.sort()
    heights = spread([height for height, _, _ in wanted], 13.0, top, bottom)
    return [
        _text(x, height + 4, label, "start", class_="label", style=f"fill:{colour}")
        for height, (_, label, colour) in zip(heights, wanted, strict=True)
    ]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move ascending numbers apart to at least ``gap``, by little, between the ends.

    >>> spread([10, 11, 40], 6, 0, 42)
    [10, 16, 40]
    """
    placed: list[float] = []
    for number in wanted:
        placed.append(max(number, placed[-1] + gap) if placed else max(number, low))
    limit = high
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - gap
    return placed


def thin_out(points: Sequence[Point], limit: int = 240) -> list[Point]:
    """Return at most about ``limit`` points that keep the line's shape: each stretch's extremes."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        finite = [p for p in stretch if math.isfinite(p[1])]
        ends = {min(finite, key=_height), max(finite, key=_height)} if finite else {stretch[0]}
        kept += sorted(ends)
    return [points[0], *(p for p in kept if p not in (points[0], points[-1])), points[-1]]


def path(points: Iterable[Point], place: Callable[[Point], Point], *, dots: bool = False) -> str:
    """Return the ``d`` of a line; where y is not a number the pen is lifted.

    A point without neighbours becomes a dot, as every point does with ``dots``.

    >>> path([(0, 0), (1, 2), (2, math.nan), (3, 4)], lambda point: point)
    'M0 0L1 2M3 4h0'
    """
    strokes: list[list[str]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            strokes[-1].append(" ".join(map(_n, place(point))))
        if dots or not math.isfinite(point[1]):
            strokes.append([])
    return "".join("M" + "L".join(s) + "h0" * (len(s) == 1) for s in strokes if s)


def lanes(name: str, channels: Sequence[Line], rug: Sequence[float] = ()) -> Html:
    """Draw each line in a lane of its own, first on top; ``rug`` marks places along the x axis."""
    width = 232.0
    lane = max(16.0, min(64.0, 96.0 / len(channels)))
    floor = lane * len(channels) + 6
    xs = [px for line in channels for px, _ in line.points]
    x = Axis(min(xs), max(xs)) if max(xs) > min(xs) else Axis(min(xs) - 1, min(xs) + 1)
    parts = [_straight(0, floor, width, floor, "axis")]
    parts += [
        _straight(px, floor, px, floor + 5, "axis")
        for px in (3 + (width - 6) * x.at(time) for time in rug)
    ]
    for i, line in enumerate(channels):
        ys = [py for _, py in line.points if math.isfinite(py)]
        y = Axis(min(ys), max(ys)) if max(ys) > min(ys) else Axis(ys[0] - 1, ys[0] + 1)
        place = _in_lane(x, y, (3, width - 6), (2 + i * lane, lane - 3))
        parts.append(_polyline(line, place))
    return _svg(name, width, floor + (6 if rug else 1), parts, class_="lanes")


def _in_lane(
    x: Axis, y: Axis, across: tuple[float, float], down: tuple[float, float]
) -> Callable[[Point], Point]:
    """Return what places a point, from starts and lengths in pixels."""

    def place(point: Point) -> Point:
        return (
            across[0] + across[1] * x.at(point[0]),
            down[0] + down[1] * (1 - y.at(point[1])),
        )

    return place


# --- areas ---------------------------------------------------------------------------------------


def matrix(
    name: str,
    counts: Sequence[Sequence[int]],
    labels: Sequence[str],
    *,
    row_title: str,
    column_title: str,
) -> Html:
    """Draw a confusion matrix: shades are shares of a row, numbers stand where there is room."""
    size = len(labels)
    cell = min(64.0, max(20.0, 300 / size)) if size <= 30 else 480 / size
    short = [shorten(label, 14) for label in labels]
    longest = TEXT * max(len(label) for label in short)
    every = math.ceil(13 / cell)
    left = longest + 32
    upright = max(len(label) for label in short) * TEXT <= cell * every - 3
    top = 40 if upright else longest + 32
    aside = f"translate(11 {_n(top + cell * size / 2)}) rotate(-90)"
    parts = [
        _text(left + cell * size / 2, 12, column_title, "middle", class_="name"),
        _text(0, 0, row_title, "middle", class_="name", transform=aside),
    ]
    for i in range(0, size, every):
        middle = (i + 0.5) * cell
        parts.append(_text(left - 6, top + middle + 4, short[i], "end"))
        turned = f"translate({_n(left + middle + 4)} {_n(top - 7)}) rotate(-90)"
        parts.append(
            _text(left + middle, top - 8, short[i], "middle")
            if upright
            else _text(0, 0, short[i], "start", transform=turned)
        )
    side = cell * size
    ground = tag("rect", x=_n(left), y=_n(top), width=_n(side), height=_n(side), class_="ground")
    parts += [ground, *_cells(counts, labels, left, top, cell)]
    return _svg(name, left + side + 4, top + side + 4, parts)


def _cells(
    counts: Sequence[Sequence[int]], labels: Sequence[str], left: float, top: float, cell: float
) -> list[Html]:
    gap = 1.0 if cell > 8 else 0.25
    side, parts = _n(cell - gap), []
    shades: dict[tuple[str, int], list[str]] = {}
    for i, row in enumerate(counts):
        total = sum(row)
        for j, count in enumerate(row):
            if not count:
                continue
            colour = "a" if i == j else "b"
            shade = max(1, int(10 * count / total))
            x, y = _n(left + j * cell), _n(top + i * cell)
            if cell < 20:  # so many that each as an element would make the page heavy
                shades.setdefault((colour, shade), []).append(f"M{x} {y}h{side}v{side}h-{side}z")
                continue
            said = f"{labels[i]} → {labels[j]}: {count} of {total}"
            place = {"x": x, "y": y, "width": side, "height": side}
            opacity = _n(_opacity(shade))
            title = tag("title", said)
            parts.append(tag("rect", title, **place, class_=colour, fill_opacity=opacity))
            at = left + (j + 0.5) * cell, top + (i + 0.5) * cell + 4
            on = "on" if shade >= MOST else "off"
            small = "small " if TEXT * len(str(count)) > cell - 2 else ""
            parts.append(_text(*at, str(count), "middle", class_=small + on))
    for (colour, shade), drawn in shades.items():
        opacity = _n(_opacity(shade))
        parts.append(tag("path", d="".join(drawn), class_=colour, fill_opacity=opacity))
    return parts


def _opacity(shade: int) -> float:
    """Return how dense a tenth of a row is drawn: never so that no text could be read on it."""
    return 0.94 + 0.006 * shade if shade >= MOST else 0.1 + 0.08 * shade


def heatmap(
    name: str,
    rows: Sequence[tuple[str, str, Sequence[float]]],  # label, class of its colour, values 0 to 1
    columns: Sequence[int],
    *,
    x_title: str,
) -> Html:
    """Draw rows of shaded cells; a row may end early."""
    rows = [(shorten(label, 32), colour, values) for label, colour, values in rows]
    width, top = 760.0, 6.0
    cell_height = 20.0 if len(rows) <= 16 else 14.0
    left = 14 + TEXT * max(len(label) for label, _, _ in rows)
    cell = (width - left - 8) / len(columns)
    parts = []
    for i, (label, colour, values) in enumerate(rows):
        y = top + i * cell_height
        parts.append(_text(left - 8, y + cell_height / 2 + 4, label, "end"))
        for j, value in enumerate(values):
            said = f"{label}: the first {columns[j]} make up {100 * value:.1f} %"
            parts.append(
                tag(
                    "rect",
                    tag("title", said),
                    x=_n(left + j * cell),
                    y=_n(y),
                    width=_n(cell - (1 if cell > 5 else 0.2)),
                    height=_n(cell_height - 1),
                    class_=colour,
                    fill_opacity=_n(0.04 + 0.96 * value**2),
                )
            )
    bottom = top + len(rows) * cell_height
    widest = TEXT * max(len(str(c)) for c in columns) + 8
    for j in range(0, len(columns), math.ceil(widest / cell)):
        parts.append(_text(left + (j + 0.5) * cell, bottom + 15, str(columns[j]), "middle"))
    parts.append(_text(left + (width - left) / 2, bottom + 32, x_title, "middle", class_="name"))
    return _svg(name, width, bottom + 38, parts)


def scatter(
    name: str,
    points: Sequence[Point],
    x: Axis,
    y: Axis,
    ideal: tuple[Point, Point],
    *,
    x_title: str,
    y_title: str,
) -> Html:
    """Draw points, and the line on which they would ideally lie."""
    left = 26 + TEXT * max(len(y.text(t)) for t in y.ticks())
    side, top = WIDTH - left - 8, 8.0

    def place(point: Point) -> Point:
        return left + side * x.at(point[0]), top + side * (1 - y.at(point[1]))

    parts = []
    for tick in y.ticks():
        level = place((x.low, tick))[1]
        parts.append(_straight(left, level, left + side, level, "grid"))
        parts.append(_text(left - 6, level + 4, y.text(tick), "end"))
    for tick in x.ticks():
        across = place((tick, y.low))[0]
        parts.append(_straight(across, top, across, top + side, "grid"))
        parts.append(_text(across, top + side + 16, x.text(tick), "middle"))
    parts.append(_straight(*place(ideal[0]), *place(ideal[1]), "mark"))
    dots = "".join(f"M{_n(px)} {_n(py)}h0" for px, py in map(place, points))
    parts.append(tag("path", d=dots, class_="dots"))
    parts.append(_text(left + side / 2, top + side + 34, x_title, "middle", class_="name"))
    turned = f"translate(11 {_n(top + side / 2)}) rotate(-90)"
    parts.append(_text(0, 0, y_title, "middle", class_="name", transform=turned))
    return _svg(name, WIDTH, top + side + 40, parts)


# --- parts ---------------------------------------------------------------------------------------


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _svg(name: str, width: float, height: float, parts: Sequence[Html], **attributes: str) -> Html:
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {_n(width)} {_n(height)}",
        width=_n(width),
        height=_n(height),
        role="img",
        aria_label=name,
        **attributes,
    )


def _text(
    x: float,
    y: float,
    text: str,
    anchor: Literal["start", "middle", "end"],
    **attributes: str,
) -> Html:
    place = {} if "transform" in attributes else {"x": _n(x), "y": _n(y)}
    turned = None if anchor == "start" else anchor
    return tag("text", text, **place, text_anchor=turned, **attributes)


def _straight(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    return tag("path", d=f"M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}", class_=class_)


def _round_step(step: float, digits: tuple[float, ...] = (1, 2, 2.5, 5, 10)) -> float:
    """Return the next of the digits times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(d * power for d in digits if d * power >= step * (1 - 1e-9))


def _height(point: Point) -> float:
    return point[1]


def _n(number: float) -> str:
    return (
        f"{number:.1f}".removesuffix(".0")
        if abs(number) >= 2
        else f"{number:.2f}".rstrip("0").rstrip(".")
    )

"""Draw bar charts as SVG text, in colours that are legible on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, LABELS, ROW = 760, 310, 24
TEXT, STRONG, PLAIN = "#768089", "#6f7fe0", "#a8b0b8"


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its length and the text after it; `strong` bars are jattn's."""

    label: str
    value: float
    text: str
    strong: bool = True


@dataclass(frozen=True)
class Panel:
    """Bars of one unit under a title, scaled to `full`, with a line at `mark`."""

    title: str
    bars: Sequence[Bar]
    mark: float | None = None
    full: float | None = None


def svg(name: str, panels: Sequence[Panel]) -> str:
    """Draw the panels one below the other. `name` is what a screen reader reads out."""
    lines, y = [], 0
    for panel in panels:
        y += 22
        lines.append(f'<text x="0" y="{y}" font-weight="600">{escape(panel.title)}</text>')
        y += 12
        unit = (WIDTH - LABELS - 80) / (panel.full or max(bar.value for bar in panel.bars))
        top = y
        for bar in panel.bars:
            x, colour = LABELS + max(2.0, bar.value * unit), STRONG if bar.strong else PLAIN
            lines += [
                f'<text x="{LABELS - 10}" y="{y + 16}" text-anchor="end">'
                f"{escape(bar.label)}</text>",
                f'<rect x="{LABELS}" y="{y + 3}" width="{x - LABELS:.1f}" height="{ROW - 6}" '
                f'rx="2" fill="{colour}"/>',
                f'<text x="{x + 8:.1f}" y="{y + 16}">{escape(bar.text)}</text>',
            ]
            y += ROW
        if panel.mark is not None:
            x = f"{LABELS + panel.mark * unit:.1f}"
            lines.append(f'<path d="M{x} {top}V{y}" stroke="{TEXT}" stroke-dasharray="3 3"/>')
        y += 12
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'height="{y}" role="img" font-family="sans-serif" font-size="14" fill="{TEXT}">'
    )
    return "\n".join([head, f"<title>{escape(name)}</title>", *lines, "</svg>", ""])

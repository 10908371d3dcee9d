"""The pieces of a report's HTML page: its style, and cards, tiles and tables of text that they escape."""

from collections.abc import Mapping, Sequence
from html import escape

Cell = str | tuple[str, str]  # a number; with a second text, that stands beside it in small print

_STYLE = """
:root { color-scheme: light dark; --paper: #f7f7f4; --card: #fff; --ink: #1b1e23; --soft: #5a626d;
  --line: #e2e2dc; --first: #2358c9; --second: #b35309; --third: #1f7a4d; --fourth: #8a3fb0;
  --fill: #7ea0e6; --alert: #fdf0e3; --mark: #fbe0c0 }
@media (prefers-color-scheme: dark) { :root { --paper: #111316; --card: #191c20; --ink: #e9ebee;
  --soft: #9ea7b1; --line: #2d3238; --first: #86adff; --second: #f0a45f;
  --third: #63c795; --fourth: #cf94ea; --fill: #4469b5; --alert: #33261a; --mark: #533c20 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1120px; margin: 0 auto; padding: 28px 16px 48px }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 10px; overflow-wrap: anywhere }
h2 { font-size: 1rem; margin: 0 }
p { margin: 0 }
small { font-size: .8rem }
small, dt, th { color: var(--soft) }
.settings { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 0 0 20px; font-size: .875rem }
.settings div { overflow-wrap: anywhere; min-width: 0 }
.settings dt, .settings dd { display: inline; margin: 0 }
.finding, .alert { border-left: 4px solid; border-radius: 4px; padding: 10px 14px; margin: 0 0 20px }
.finding { background: var(--card); border-color: var(--line) }
.alert { background: var(--alert); border-color: var(--second) }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px }
main > .card + .card { margin: 12px 0 0 }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px }
.tiles b { display: block; font-size: 1.7rem; line-height: 1.25; font-variant-numeric: tabular-nums }
.tiles small { display: block; text-wrap: balance }
.columns { columns: 2 440px; column-gap: 12px; margin: 12px 0 0 }
.columns .card { break-inside: avoid; margin: 0 0 12px }
svg { display: block; width: 100%; height: auto; margin: 10px 0 6px }
svg text { font-size: 11px; fill: var(--soft) }
svg .name, svg .value { fill: var(--ink) }
svg .value { paint-order: stroke; stroke: var(--card); stroke-width: 4px }
.grid { stroke: var(--line); fill: none }
.fill { fill: var(--fill) }
.whisker { stroke: var(--ink); stroke-width: 1.5; fill: none }
polyline { fill: none; stroke-width: 2 }
.first polyline, .first .whisker { stroke: var(--first) }
.first circle { fill: var(--first) }
.second polyline, .second .whisker { stroke: var(--second) }
.second polyline { stroke-dasharray: 5 4 }
.second circle { fill: var(--card); stroke: var(--second); stroke-width: 2 }
.third polyline, .third .whisker { stroke: var(--third) }
.third polyline { stroke-dasharray: 2 3 }
.third circle { fill: var(--third) }
.fourth polyline, .fourth .whisker { stroke: var(--fourth) }
.fourth polyline { stroke-dasharray: 9 3 }
.fourth circle { fill: var(--card); stroke: var(--fourth); stroke-width: 2 }
.line polyline { stroke: currentColor }
.line circle, svg .line text { fill: currentColor }
.entry { display: inline-block; margin-right: 12px }
.key { display: inline-block; width: 10px; height: 10px; margin: 0 5px 0 0; border: 2px solid;
  border-radius: 50% }
.key.first { color: var(--first); background: var(--first) }
.key.second { color: var(--second) }
.key.third { color: var(--third); background: var(--third) }
.key.fourth { color: var(--fourth) }
.texts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(max(260px, 40%), 100%), 1fr)); gap: 8px 16px;
  border-top: 1px solid var(--line); padding: 10px 0; margin: 10px 0 0 }
.texts p { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem }
.texts .question { grid-column: 1 / -1; color: var(--soft); max-height: 9em; overflow-y: auto }
.texts mark { background: var(--mark); color: inherit }
.wide { overflow-x: auto }
.wide + .wide { margin: 14px 0 0 }
.card > p + .wide { margin: 8px 0 0 }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: 5px 0 5px 12px; text-align: right; vertical-align: top; border-top: 1px solid var(--line) }
th { font-weight: 500; vertical-align: bottom }
th:first-child { text-align: left; padding-left: 0 }
thead th { border-top: 0 }
td { white-space: nowrap }
tbody th { color: var(--ink); font-weight: 400; vertical-align: top }
td small { display: inline-block; margin-left: 6px; font-size: .93em }
.notes { columns: 2 440px; margin: 12px 0 0; font-size: .875rem }
.notes div { break-inside: avoid }
.notes dt { font-weight: 600; color: var(--ink) }
.notes dd { margin: 0 0 6px }
@media (max-width: 460px) {
  .card { padding: 14px 12px }
  svg text { font-size: 13px }
  table { font-size: .78rem }
  th, td { padding-left: 8px }
}
"""


def document(title: str, body: Sequence[str]) -> str:
    """The page with ``body``, which is markup; nothing in it is fetched from elsewhere."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{_STYLE}\n</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def pairs(style: str, items: Mapping[str, str]) -> str:
    """A list of terms, each with its text, in the class ``style``."""
    rows = [f"<div><dt>{escape(term)}</dt> <dd>{escape(text)}</dd></div>" for term, text in items.items()]
    return f'<dl class="{style}">{"".join(rows)}</dl>' if rows else ""


def tile(name: str, number: str, note: str) -> str:
    """One number in large print."""
    return f'<div class="card">{escape(name)}<b>{escape(number)}</b><small>{escape(note)}</small></div>'


def card(heading: str, note: str, *, body: str) -> str:
    """A box under ``heading``; ``note`` and ``body`` are markup."""
    head = f"<h2>{escape(heading)}</h2><p><small>{note}</small></p>"
    return f'<section class="card">{head}{body}</section>'


def legend(styles: Mapping[str, str], note: str) -> str:
    """What the curves of a chart are, by name and class, with ``note`` below, as a card's markup."""
    entries = [
        f'<span class="entry"><i class="key {style}"></i>{escape(name)}</span>'
        for name, style in styles.items()
    ]
    return f"{' '.join(entries)}<br>{escape(note)}"


def table(name: str, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Rows whose first cell is their heading, or nothing without rows; it scrolls on a narrow screen."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in header)
    body = "".join(f"<tr>{_row(row)}</tr>" for row in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}"><table>'
        f"{f'<thead><tr>{head}</tr></thead>' if header else ''}<tbody>{body}</tbody></table></div>"
    )


def _row(row: Sequence[Cell]) -> str:
    name, *numbers = row
    return f'<th scope="row">{_cell(name)}</th>{"".join(f"<td>{_cell(number)}</td>" for number in numbers)}'


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    return f"{escape(cell[0])}<wbr><small>{escape(cell[1])}</small>"

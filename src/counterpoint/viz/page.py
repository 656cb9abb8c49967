"""Build self-contained HTML pages: style, tables, timelines, and cards with single numbers.

The style fits light and dark screens, telephones and paper.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from counterpoint.viz.markup import escape, tag
from counterpoint.viz.number_format import format_number

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2630; --quiet: #5c6773; --line: #e1e5ea;
  --card: #f6f8fa; --good: #1a7f4b; --bad: #b42318;
  --forward: #2b6cb0; --backward: #23794b; --update: #b45309; --communication: #7c4dbe; --commit: #b83280; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #11151b; --ink: #dfe4ea; --quiet: #98a3b0;
  --line: #2a323c; --card: #191f27; --good: #56c288; --bad: #ff8f82;
  --forward: #7ab0ec; --backward: #6ac795; --update: #eba45a; --communication: #b794f0; --commit: #ee86bd; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 2.5rem clamp(1rem, 4vw, 3rem) 4rem; }
h1 { font-size: clamp(1.5rem, 4vw, 2.1rem); line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 .6rem;
  overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.75rem 0 .75rem; }
h3 { font-size: .95rem; font-weight: 600; margin: 1.25rem 0 .4rem; }
p { margin: .3rem 0; }
code, pre { font-family: ui-monospace, "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font-size: .92em; background: var(--card); border: 1px solid var(--line); border-radius: 5px; padding: .1em .4em;
  overflow-wrap: anywhere; }
pre { margin: 0; font-size: .8rem; line-height: 1.65; }
.quiet { color: var(--quiet); font-size: .9rem; }
.status { font-weight: 600; margin-top: .7rem; overflow-wrap: anywhere; }
.status::before { content: ""; display: inline-block; width: .6em; height: .6em; border-radius: 50%;
  background: currentColor; margin-right: .5em; }
.good { color: var(--good); } .bad { color: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .75rem;
  margin: 1.75rem 0 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .7rem .9rem;
  min-width: 0; }
.figures dt { color: var(--quiet); font-size: .85rem; overflow-wrap: anywhere; }
.figures dd { margin: .1rem 0 0; font-size: 1.3rem; font-weight: 600; line-height: 1.3; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
.figures small { font-size: .85rem; font-weight: 400; color: var(--quiet); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; min-width: 0; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 10px; padding: 1rem; }
pre.wide { background: var(--card); }
.timeline svg { min-width: 52rem; }
.timeline + .timeline { margin-top: 1rem; }
svg { display: block; color: var(--ink); height: auto; }
div.wide { width: fit-content; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1.5rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; font-size: .9rem; }
th.text, td.text { text-align: left; white-space: normal; min-width: 12rem; }
th:last-child, td:last-child { padding-right: 0; }
tbody tr:last-child td { border-bottom: 0; }
details { margin-top: .75rem; } summary { cursor: pointer; color: var(--quiet); margin-bottom: .5rem; }
.forward { color: var(--forward); } .backward { color: var(--backward); } .update { color: var(--update); }
.communication { color: var(--communication); } .commit { color: var(--commit); }
@media print { body { font-size: 11pt; } details:not([open]) { display: none; }
  .charts { grid-template-columns: 1fr 1fr; }
  main { max-width: none; padding: 0; } h2 { break-after: avoid; }
  figure, tr, .figures div { break-inside: avoid; } .wide { overflow: visible; border: 0; padding: 0; }
  pre.wide { white-space: pre-wrap; overflow-wrap: anywhere; background: none; } .timeline svg { min-width: 0; }
  svg, .figures div { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
""".strip()

CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a page may load: nothing."""


def write_page(title: str, *parts: str) -> str:
    """Return a self-contained HTML page of parts that are markup already; it loads nothing and runs nothing."""
    head = tag(
        "head",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">',
        tag("title", escape(title)),
        tag("style", f"\n{STYLE}\n"),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', tag('main', *parts)), lang='en')}\n"


def scroll_area(name: str, content: str, title: str, class_: str = "") -> str:
    """Return an element that scrolls sideways on a narrow screen, also with the keyboard."""
    return tag(name, content, class_=f"{class_} wide".strip(), tabindex="0", role="group", aria_label=title)


def timeline_figure(drawing: str, title: str = "timeline") -> str:
    """Return the drawing of a trace as a figure."""
    return scroll_area("figure", drawing, title, "timeline")


def write_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], name: str, text_columns: Container[str] = ()
) -> str:
    """Return a table.

    Args:
        titles: of its columns.
        rows: the texts of its cells.
        name: of the table, for screen readers.
        text_columns: titles of the columns that hold text instead of numbers.
    """
    attributes = [{"class_": "text"} if title in text_columns else {} for title in titles]
    head = (tag("th", escape(title), scope="col", **look) for title, look in zip(titles, attributes, strict=True))
    lines = (
        tag("tr", *(tag("td", escape(cell), **look) for cell, look in zip(row, attributes, strict=True)))
        for row in rows
    )
    return scroll_area("div", tag("table", tag("thead", tag("tr", *head)), tag("tbody", *lines)), name)


@dataclass(frozen=True, slots=True)
class StatCard:
    """One number of a run, such as ``StatCard("throughput", 812.4, "samples/s")``."""

    name: str
    value: float | str
    unit: str = ""


def draw_stat_cards(figures: Sequence[StatCard]) -> str:
    """Return cards with one number each; nothing if there are none."""
    if not figures:
        return ""
    cards = [
        tag(
            "div",
            tag("dt", escape(figure.name)),
            tag(
                "dd",
                escape(format_number(figure.value)),
                f" {tag('small', escape(figure.unit))}" if figure.unit else "",
            ),
        )
        for figure in figures
    ]
    return tag("dl", *cards, class_="figures")

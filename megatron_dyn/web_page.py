# SPDX-License-Identifier: Apache-2.0
"""Pages that need nothing else: one HTML file without a script, a font or a picture from elsewhere, readable on a laptop and a phone."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from megatron_dyn.figures import as_png, write_whole

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #23272e; background: #fff; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid #e3e6ea; text-align: right; vertical-align: top; }
th:first-child, td:first-child, .facts td, .texts td, .texts th, .checks td, .checks th { text-align: left; }
th { color: #5a616b; font-weight: 600; vertical-align: bottom; }
.columns td:nth-child(2) { font-weight: 600; } .note { color: #5a616b; font-size: .9rem; margin: .2rem 0; }
.good { color: #2c7a4b; font-weight: 600; } .bad { color: #b3261e; font-weight: 600; } .undecided { color: #946200; font-weight: 600; }
.open { color: #5a616b; }
.headline { font-size: 1.1rem; margin: .2rem 0; }
img { max-width: 100%; height: auto; } figure { margin: 1.2rem 0; overflow-x: auto; } figcaption { color: #5a616b; font-size: .9rem; }
figure:target img { max-width: none; } figure .smaller, figure:target .larger { display: none; } figure:target .smaller { display: inline; }
@media (max-width: 700px) {
  .checks, .checks tbody { display: block; } .checks th { display: none; } .checks td { border: 0; padding: 0; }
  .checks tr { display: flex; flex-wrap: wrap; gap: 0 .8rem; padding: .45rem 0; border-bottom: 1px solid #e3e6ea; }
  .checks td:last-child { flex-basis: 100%; font-weight: 400; } .checks td[data-name]::before { content: attr(data-name) " "; font-weight: 400; }
}
"""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, classes: Sequence[str] = (), kind: str = "plain") -> str:
    """A table of texts.

    Args:
        columns: headings; none for a list of facts.
        rows: cells; they are escaped.
        classes: a CSS class for each row.
        kind: "plain" (numbers to the right), "columns" (the second column stands out), "facts" or "texts" (all to the left), or "checks" (as "texts";
            on a phone each row is a block, its last cell, a sentence, below the others, and numbers are named by their columns).
    """
    lines = [f'<div class="scroll"><table class="{kind}">']
    if columns:
        lines.append("<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in columns) + "</tr>")
    told = kind == "checks"
    for number, row in enumerate(rows):
        named = [f' data-name="{html.escape(name)}"' if told and name in ("value", "limit") else "" for name in columns] or [""] * len(row)
        opening = f'<tr class="{classes[number]}">' if classes else "<tr>"
        lines.append(opening + "".join(f"<td{name}>{html.escape(cell)}</td>" for name, cell in zip(named, row)) + "</tr>")
    return "\n".join([*lines, "</table></div>"])


def picture(name: str, content: bytes, caption: str) -> str:
    """A PNG inside the page, as wide as the page; a touch shows it at its full size, to be moved sideways.

    Args:
        name: of this picture in the page's address; unlike all others of the page.
        content: the file's bytes.
        caption: below it, and read out instead of it.
    """
    told, place = html.escape(caption), html.escape(name)
    links = f'<a class="larger" href="#{place}">full size</a><a class="smaller" href="#{place}-fitted">fit to the page</a>'
    return (
        f'<figure id="{place}"><a href="#{place}"><img alt="{told}" src="data:image/png;base64,{base64.b64encode(content).decode()}"></a>'
        f"<figcaption>{told} {links}</figcaption></figure>"
    )


def write_pictures(folder: Path, drawn: Mapping[str, tuple[str, Figure]]) -> tuple[list[Path], list[str]]:
    """Each figure as a PNG file in the folder, and as part of a page.

    Args:
        drawn: name of the file -> (caption, figure).

    Returns:
        The files, and the HTML of each.
    """
    written, shown = [], []
    for name, (caption, figure) in drawn.items():
        content = as_png(figure)
        write_whole(folder / f"{name}.png", content)
        written.append(folder / f"{name}.png")
        shown.append(picture(name, content, caption))
    return written, shown


def page(title: str, body: Sequence[str]) -> bytes:
    """The whole file.

    Args:
        body: HTML, piece by piece.
    """
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    ).encode()

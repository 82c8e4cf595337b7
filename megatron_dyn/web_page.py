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
th:first-child, td:first-child, .facts td, .texts td, .texts th { text-align: left; } th { color: #5a616b; font-weight: 600; vertical-align: bottom; }
.columns td:nth-child(2) { font-weight: 600; } .note { color: #5a616b; font-size: .9rem; margin: .2rem 0; }
.good { color: #2c7a4b; font-weight: 600; } .bad { color: #b3261e; font-weight: 600; } .open { color: #5a616b; }
.headline { font-size: 1.1rem; margin: .2rem 0; }
img { max-width: 100%; height: auto; } figure { margin: 1.2rem 0; } figcaption { color: #5a616b; font-size: .9rem; }
"""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, classes: Sequence[str] = (), kind: str = "plain") -> str:
    """A table of texts.

    Args:
        columns: headings; none for a list of facts.
        rows: cells; they are escaped.
        classes: a CSS class for each row.
        kind: "plain" (numbers to the right), "columns" (the second column stands out), "facts" or "texts" (all to the left).
    """
    lines = [f'<div class="scroll"><table class="{kind}">']
    if columns:
        lines.append("<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in columns) + "</tr>")
    for number, row in enumerate(rows):
        opening = f'<tr class="{classes[number]}">' if classes else "<tr>"
        lines.append(opening + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>")
    return "\n".join([*lines, "</table></div>"])


def picture(content: bytes, caption: str) -> str:
    """A PNG inside the page.

    Args:
        content: the file's bytes.
        caption: below it, and read out instead of it.
    """
    told = html.escape(caption)
    return f'<figure><img alt="{told}" src="data:image/png;base64,{base64.b64encode(content).decode()}"><figcaption>{told}</figcaption></figure>'


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
        shown.append(picture(content, caption))
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

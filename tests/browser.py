"""Measures pages in a browser, where one is installed: what is wider than its place."""

import html
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.waiting import LIMIT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
_HEIGHT = 800
# A frame, as a window is never narrower than 500 pixels; each result is what ``measured`` says.
_SCRIPT = """
const found = {}
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, root = page.documentElement
  const name = element => (element.getAttribute("aria-label") || element.textContent).slice(0, 60)
  const place = element => element.getBoundingClientRect()
  for (const folded of page.querySelectorAll("details")) folded.open = true
  const tables = [...page.querySelectorAll(".wide")].map(wide => ({
    name: name(wide), width: wide.scrollWidth, room: wide.clientWidth, whole: !!wide.closest(".whole"),
    scrolls: getComputedStyle(wide).overflowX === "auto" && wide.tabIndex === 0,
    cue: getComputedStyle(wide).backgroundImage.includes("gradient")
  }))
  const outside = [...page.querySelectorAll(".card *")].filter(element => !element.closest(".wide")
    && !element.closest("svg") && place(element).width > 0
    && place(element).right > place(element.closest(".card")).right + 1).map(name)
  const marks = [...page.querySelectorAll("svg text")].filter(text =>
    place(text).right > place(text.closest("svg")).right + 1
    || place(text).left < place(text.closest("svg")).left - 1).map(name)
  found[frame.title] = {width: root.scrollWidth, room: root.clientWidth, tables, outside, marks}
}
document.body.textContent = JSON.stringify(found)
"""


def measured(pages: Mapping[str, str], widths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """What each page is at each width in pixels, by ``NAME at WIDTH``.

    ``width`` and ``room`` of the page and of each of its ``tables``, elements ``outside`` of their cards, and ``marks``
    outside of their charts; folded tables are open.
    """
    frames = "".join(
        f'<iframe title="{name} at {width}" style="width:{width}px;height:{_HEIGHT}px;border:0" '
        f'srcdoc="{html.escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in widths
    )
    document = f"<!doctype html><body>{frames}<script>onload = () => {{ {_SCRIPT} }}</script></body>"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "frames.html"
        path.write_text(document, encoding="utf-8")
        command = [
            str(CHROMIUM),
            *_OPTIONS,
            f"--user-data-dir={directory}/profile",
            "--dump-dom",
            path.as_uri(),
        ]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    body = re.search(r"<body>(.*)</body>", shown, re.DOTALL)
    assert body is not None, shown[:500]
    found: dict[str, dict[str, Any]] = json.loads(html.unescape(body[1]))
    return found

"""The page's own files, and the one document made of them: empty for the server, frozen with a job's content."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec

_FOLDER = Path(__file__).parent
SCRIPTS = ("base.js", "timeline.js", "job.js", "app.js")
"""Scripts in the order in which they run."""
STYLE = "page.css"
ICON = "icon.svg"
ASSETS = {name: _FOLDER / name for name in (*SCRIPTS, STYLE, ICON)}
"""Files that the server gives out, by name."""
_DARK = re.compile(r':root\[data-theme="dark"\] (\{\n.*?\n\})', re.DOTALL)


def document() -> str:
    """Return the page that loads its files from its server."""
    head = f'<link rel="stylesheet" href="/assets/{STYLE}"><link rel="icon" href="/assets/{ICON}">'
    scripts = "".join(f'<script src="/assets/{name}" defer></script>' for name in SCRIPTS)
    return _filled(head, scripts)


def style() -> str:
    """Return the style sheet, with the dark colours also for those whose system is dark."""
    text = ASSETS[STYLE].read_text(encoding="utf-8")
    dark = _DARK.search(text)
    assert dark is not None
    system = ':root:not([data-theme="light"])'
    return f"{text}@media (prefers-color-scheme: dark) {{ {system} {dark[1]} }}\n"


def frozen(content: dict[str, Any]) -> str:
    """Return the page as one file with a job's content. It refers to nothing outside itself."""
    code = "\n".join(ASSETS[name].read_text(encoding="utf-8") for name in SCRIPTS)
    # Where markup is read, "<" might end the element; in JSON it can be written in another way.
    data = msgspec.json.encode(content).decode().replace("<", "\\u003c")
    sheet = style()
    policy = (
        f"default-src 'none'; script-src {_hash(code)}; style-src {_hash(sheet)}; base-uri 'none'; "
        "form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{sheet}</style>'
        f'<script type="application/json" id="content">{data}</script>'
    )
    return _filled(head, f"<script>{code}</script>")


def _filled(head: str, scripts: str) -> str:
    text = (_FOLDER / "page.html").read_text(encoding="utf-8")
    return text.replace("<!-- head -->", head).replace("<!-- scripts -->", scripts)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

"""Build XML and HTML elements as text; text from outside is escaped here and nowhere else."""

from __future__ import annotations

import html
import re

_NOT_SHOWN = re.compile(
    "[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"  # forbidden in XML
    "|[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"  # control characters, and marks of direction
)


def escape(text: str) -> str:
    """Return text escaped for content and attributes of XML and HTML; control characters become U+FFFD."""
    return html.escape(_NOT_SHOWN.sub("\ufffd", text), quote=True)


def tag(name: str, *content: str, **attributes: str | float) -> str:
    """Return an element around content that is markup already; ``font_size`` becomes the attribute font-size.

    Without content the element closes itself, which SVG allows everywhere and HTML for void elements.
    """
    texts = {
        key: escape(value) if isinstance(value, str) else format_coordinate(value) for key, value in attributes.items()
    }
    head = "".join(f' {key.rstrip("_").replace("_", "-")}="{text}"' for key, text in texts.items())
    return f"<{name}{head}>{''.join(content)}</{name}>" if content else f"<{name}{head}/>"


def label(text: str, **attributes: str | float) -> str:
    """Return an SVG text element."""
    return tag("text", escape(text), **attributes)


def format_coordinate(value: float) -> str:
    """Format a number for an attribute: at most two decimals, and no exponent."""
    return f"{round(value, 2) + 0.0:.2f}".rstrip("0").rstrip(".")


def svg_picture(width: float, height: float, title: str, description: str, *content: str) -> str:
    """Return an inline SVG with a title and a description.

    Its text is of a grey that is legible on light and on dark; a page that sets the colour of ``svg`` overrides it.
    """
    return tag(
        "svg",
        tag("title", escape(title)),
        tag("desc", escape(description)),
        *content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {format_coordinate(width)} {format_coordinate(height)}",
        width="100%",
        role="img",
        color="#747b85",
        fill="currentColor",
        font_family="system-ui, sans-serif",
        font_size=12,
    )

"""The messages that `docs/how-to/troubleshooting.md` documents for each mistake."""

import re
from functools import cache

from tests.house.source import ROOT

PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"


@cache
def documented_messages(title):
    """Return the texts under a heading of the page, each on one line."""
    _, result, rest = PAGE.read_text(encoding="utf-8").partition(f"### {title}\n")
    assert result, f"the page has no heading {title!r}"
    part = re.split(r"^##", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return [
        " ".join(block.split()) for block in re.findall(r"^```text\n(.*?)^```", part, flags=re.MULTILINE | re.DOTALL)
    ]

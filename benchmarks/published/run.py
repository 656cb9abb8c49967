"""Published figures beside simulated ones."""

import sys
from pathlib import Path

from counterpoint.testing.claims import Options, Result

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.published.page import TABLES, all_tables, page, shown_cells

PAGE = Path(__file__).parents[2] / "docs" / "published.md"


def measure(options: Options) -> Result:
    options.tell(f"{len(TABLES)} tables")
    rows, missed, figures = [], [], {}
    for table in all_tables():
        missed += table.wrong()
        for row in table.rows:
            *labels, published, simulated, difference = shown_cells(row)
            rows.append((table.title, ", ".join(labels), published, simulated, difference))
            figures[f"{table.title} / {' / '.join(labels)}"] = {"published": published, "simulated": row.simulated}
    if page() != PAGE.read_text(encoding="utf-8"):
        missed.append(f"{PAGE} says something else; `make golden` writes it again")
    reasons = [(f"({mark})", why) for table in all_tables() for mark, why in table.reasons]
    return Result(
        columns=("table", "figure", "published", "simulated", "difference"),
        rows=tuple(rows),
        missed=tuple(missed),
        figures=figures,
        notes={"marks": f"stand for {len(reasons)} reasons, which docs/published.md gives below each table"},
    )

"""Published figures compared with simulated ones."""

import sys
from pathlib import Path

from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.published.page import TABLES, all_tables, format_cells, render_page

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "published.md"


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    options.report_progress(f"{len(TABLES)} tables")
    rows, missed, figures = [], [], {}
    for table in all_tables():
        missed += table.find_errors()
        for row in table.rows:
            *labels, published, simulated, difference = format_cells(row)
            rows.append((table.title, ", ".join(labels), published, simulated, difference))
            figures[f"{table.title} / {' / '.join(labels)}"] = {"published": published, "simulated": row.simulated}
    if render_page() != PAGE.read_text(encoding="utf-8"):
        missed.append(f"{PAGE} says something else; `make golden` writes it again")
    reasons = [(f"({mark})", why) for table in all_tables() for mark, why in table.reasons]
    return BenchmarkResult(
        columns=("table", "figure", "published", "simulated", "difference"),
        rows=tuple(rows),
        missed=tuple(missed),
        figures=figures,
        notes={"marks": f"stand for {len(reasons)} reasons, which the page gives below each table"},
    )

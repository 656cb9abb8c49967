"""Check that what pages and settings name is there: make targets, pins, decision records."""

import re
import tomllib

from tests.house.source import PAGES, ROOT, name_of

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PINS = [line for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
DECISIONS = sorted((ROOT / "docs" / "explanation" / "decisions").glob("[0-9]*.md"))


def plain(requirement):
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def test_every_make_command_in_a_page_is_a_target():
    commands = re.compile(r"(?:`|^ *\$? *)make ([a-z-]+)", flags=re.MULTILINE)
    named = {
        (name_of(page), command) for page in PAGES for command in commands.findall(page.read_text(encoding="utf-8"))
    }
    assert named
    assert not [(page, command) for page, command in named if command not in TARGETS]


def test_the_words_of_the_makefile_are_all_there():
    assert {"setup", "check", "test", "test-long", "test-all", "golden", "docs", "bench", "demo"} <= TARGETS


def test_what_the_readme_calls_the_tests_is_what_ci_runs():
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "for target in test test-long; do" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_requirement_is_pinned():
    extras = PROJECT["optional-dependencies"].values()
    required = {plain(entry) for entry in [*PROJECT["dependencies"], *(entry for extra in extras for entry in extra)]}
    assert required <= {plain(pin) for pin in PINS}


def test_a_pin_is_a_name_and_a_version_and_nothing_else():
    assert not [pin for pin in PINS if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin)]
    assert [plain(pin) for pin in PINS] == sorted({plain(pin) for pin in PINS})


def test_what_ci_installs_has_hashes_and_the_pinned_versions():
    text = (ROOT / "requirements-ci.txt").read_text(encoding="utf-8")
    entries = re.findall(r"^(\S+==\S+) ((?:\\\n    --hash=sha256:[0-9a-f]{64} ?)+)$", text, flags=re.MULTILINE)
    assert {name for name, _ in entries} <= {*PINS}
    assert len(entries) == len(re.findall(r"^\w", text, flags=re.MULTILINE)) > 50
    assert "://" not in text


def test_decisions_are_numbered_without_gap_or_double():
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))


def test_a_decision_has_context_decision_and_consequences():
    wanted = ["Context", "Decision", "Consequences"]
    headings = {
        path: re.findall(r"^## (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE) for path in DECISIONS
    }
    assert not [
        name_of(path) for path, result in headings.items() if [one for one in result if one in wanted] != wanted
    ]


def test_every_relative_link_of_a_page_leads_somewhere():
    link = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)(?:#[^)\s]*)?\)")
    linked = [(page, target) for page in PAGES for target in link.findall(page.read_text(encoding="utf-8"))]
    assert linked
    assert not [f"{name_of(page)}: {target}" for page, target in linked if not (page.parent / target).exists()]


def test_every_source_file_that_a_page_names_is_there():
    named = re.compile(r"`((?:src/counterpoint/|tests/|benchmarks/|examples/)?[a-z_0-9]+(?:/[a-z_0-9]+)+\.py)`")
    roots = [ROOT, ROOT / "src" / "counterpoint"]
    named_files = [(page, name) for page in PAGES for name in named.findall(page.read_text(encoding="utf-8"))]
    assert named_files
    missing = [(page, name) for page, name in named_files if not any((root / name).is_file() for root in roots)]
    assert not [f"{name_of(page)}: {name}" for page, name in missing]


def test_every_promise_of_the_security_page_has_its_test():
    rows = [line for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    promises = [row for row in rows if re.search(r"[^|] \| (A\d ?)+\|", row)]
    assert len(promises) > 10
    assert not [row for row in promises if "`test_" not in row]
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", "\n".join(rows))
    assert not [name for name in named if f"def {name}(" not in tests]

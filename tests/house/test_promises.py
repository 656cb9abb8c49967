"""What the documents and the settings promise is there: commands, pins, decisions, drawings."""

import re
import tomllib

import pytest

from tests.house.source import PAGES, ROOT, name_of

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PINS = [line for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def plain(requirement):
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_make_command_in_a_page_is_a_target(page):
    commands = set(re.findall(r"(?:`|^ *\$? *)make ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert commands <= TARGETS


def test_the_words_of_the_makefile_are_all_there():
    assert {"setup", "check", "test", "test-all", "golden", "docs", "bench", "demo"} <= TARGETS


@pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="there is no README yet")
def test_what_the_readme_calls_the_tests_is_what_ci_runs():
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "step make test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_requirement_is_pinned():
    extras = PROJECT["optional-dependencies"].values()
    required = {plain(entry) for entry in [*PROJECT["dependencies"], *(entry for extra in extras for entry in extra)]}
    assert required <= {plain(pin) for pin in PINS}


def test_a_pin_is_a_name_and_a_version_and_nothing_else():
    assert not [pin for pin in PINS if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin)]
    assert [plain(pin) for pin in PINS] == sorted({plain(pin) for pin in PINS})


def test_decisions_are_numbered_without_gap_or_double():
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize("path", DECISIONS, ids=name_of)
def test_a_decision_gives_its_reasons_and_its_price(path):
    headings = re.findall(r"^## (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [heading for heading in headings if heading in {"Context", "Decision", "Consequences"}] == [
        "Context",
        "Decision",
        "Consequences",
    ]

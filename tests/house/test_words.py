"""Style guide, section 1: one word for one thing, and no word that could mean anything."""

import re

import pytest

from tests.house.source import FILES, PAGES, ROOT, definitions, name_of, words

VAGUE = {"manager", "engine", "helper", "helpers", "util", "utils", "common", "base", "misc"}
VERBS_THAT_SAY_NOTHING = {"do", "process", "handle"}
TERMS = {
    *("arena", "axis", "block", "commit", "fabric", "instruction", "law", "ledger", "mesh", "microbatch"),
    *("order", "program", "rank", "replica", "row", "shard", "stage", "trace", "transport", "unit"),
    *("word", "world"),
}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_name_says_what_is_inside(path):
    vague = VAGUE | VERBS_THAT_SAY_NOTHING
    assert not vague & set(words(path.parent.name if path.name == "__init__.py" else path.stem))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_name_says_what_it_names(path):
    names = [definition.name for definition in definitions(path)]
    vague = [name for name in names if VAGUE & set(words(name))]
    assert not vague + [name for name in names if set(words(name)[:1]) & VERBS_THAT_SAY_NOTHING]


def test_the_glossary_defines_every_word_of_the_house_once_and_in_order():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    defined = re.findall(r"^([a-z]\w*)\n(?=  )", text, flags=re.MULTILINE)
    assert defined == sorted(set(defined))
    assert set(defined) >= TERMS


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_an_axis_belongs_to_a_mesh_and_a_dim_to_a_tensor(path):
    wrong = re.findall(r"\b(?:mesh|rank)[ _]dims?\b|\btensor[ _]ax[ei]s\b", path.read_text(encoding="utf-8"))
    assert not wrong, "see docs/glossary.md"


@pytest.mark.parametrize("path", [*FILES, *PAGES], ids=name_of)
def test_nothing_is_announced_instead_of_done(path):
    text = path.read_text(encoding="utf-8")
    unfinished = re.findall(r"\b(?:TO" r"DO|FIX" r"ME|XXX|HACK)\b|raise NotImplementedError", text)
    assert not unfinished + re.findall(r"(?i)#.*\b(?:placeholder|for now|stub|not implemented)\b", text)

"""Check names and terms: no class defined twice, no vague name, no retired word, a glossary in order."""

import ast
import re
from collections import defaultdict

from tests.house.source import (
    FILES,
    PAGES,
    ROOT,
    SOURCE,
    TEST_FILES,
    definitions,
    name_of,
    nodes,
    parsed,
    strings,
    words,
)

VAGUE = {"manager", "engine", "helper", "helpers", "util", "utils", "common", "base", "misc"}
VAGUE_VERBS = {"do", "process", "handle"}

# Two public classes that must have the same name, with the reason.
DEFINED_TWICE: dict[str, str] = {}

# Words that only the authors understood, and the term that replaces each of them.
RETIRED = {
    "arena": "flat parameters",
    "arenas": "flat parameters",
    "ballot": "step report",
    "ballots": "step reports",
    "baton": "rank scheduler",
    "commons": "shared parameters",
    "crowd": "contention",
    "crowds": "contention",
    "desk": "queue",
    "dice": "module RNG",
    "encounter": "local collective",
    "ledger": "symbolic execution",
    "leftovers": "error feedback",
    "portion": "data slice",
    "portions": "data slices",
    "rhythm": "synchronization schedule",
    "shelf": "shared buffer",
    "shelves": "shared buffers",
    "strand": "edge",
    "strands": "edges",
    "strewn": "sparse gradients",
    "tape": "saved activations",
    "tapes": "saved activations",
    "twin": "replica",
    "twins": "replica group",
    "verdict": "step result",
}
DENIED_NOUN = re.compile(
    r"(?<![Tt]here )\b(?:is|are) (?:none(?=[;.(]| \()|no (?!longer|more|other|wider|narrower|faster)[a-z])"
)
PLACE = re.compile(r"\((?:grad|weight|late)?\d")  # of every retired instruction, and found at once by its parenthesis
RETIRED_INSTRUCTION = re.compile(
    r"(?<![\w.])(?:sum|share|join|copy|mean|tell|serve|take|draw:[\d.]+|swap|release)(?::\w+)?\((?:grad|weight|late)?\d[\d,+]*\)"
)


def test_no_class_name_is_defined_twice():
    places = defaultdict(set)
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].add(name_of(path))
    twice = {name: sorted(where) for name, where in places.items() if len(where) > 1 and name not in DEFINED_TWICE}
    assert not twice, "one name means one thing: name each class by its subject"


def test_a_file_name_says_what_is_inside():
    stems = {path: path.parent.name if path.name == "__init__.py" else path.stem for path in FILES}
    assert not [name_of(path) for path, stem in stems.items() if VAGUE & set(words(stem))]


def test_a_name_says_what_it_names():
    vague = [
        f"{name_of(path)}: {definition.name}"
        for path in FILES
        for definition in definitions(path)
        if VAGUE & set(words(definition.name))
        or (not isinstance(definition, ast.ClassDef) and VAGUE_VERBS & set(words(definition.name)[:1]))
    ]
    assert not vague


def identifiers(path):
    """Yield every name that a file defines, binds or takes as a parameter."""
    yield from ((node.name, node.lineno) for node in definitions(path))
    yield from ((node.id, node.lineno) for node in nodes(path, ast.Name) if isinstance(node.ctx, ast.Store))
    yield from ((node.attr, node.lineno) for node in nodes(path, ast.Attribute) if isinstance(node.ctx, ast.Store))
    yield from ((node.arg, node.lineno) for node in nodes(path, ast.arg))


def test_no_retired_word_is_left_in_a_name():
    left = [f"{name_of(path)}: {stem}" for path in FILES for stem in words(path.stem) if stem in RETIRED]
    left += [
        f"{name_of(path)}:{line}: {name} ({RETIRED[word]})"
        for path in [*FILES, *TEST_FILES]
        for name, line in identifiers(path)
        for word in words(name)
        if word in RETIRED
    ]
    assert not left


def retired_words(text):
    """Return the retired words of a text, in whatever case."""
    return [word for word in re.findall(r"\w+", text) if word.lower() in RETIRED]


def test_no_retired_word_is_left_in_a_docstring_or_a_message():
    left = [
        f"{name_of(path)}:{line}: {word} ({RETIRED[word.lower()]})"
        for path in FILES
        for text, line in strings(path)
        for word in retired_words(text)
    ]
    assert not left


def test_no_retired_word_is_left_in_a_page():
    left = [
        f"{name_of(page)}: {word} ({RETIRED[word.lower()]})"
        for page in PAGES
        for word in retired_words(page.read_text(encoding="utf-8"))
    ]
    assert not left


def test_a_text_says_what_a_value_is_not_in_plain_english():
    """``x is not a number``, where this project used to say that it is no number, or is none."""
    texts = [(name_of(page), page.read_text(encoding="utf-8")) for page in PAGES if "decisions" not in page.parts]
    texts += [(f"{name_of(path)}:{line}", text) for path in FILES for text, line in strings(path)]
    assert not [f"{place}: {result[0]}" for place, text in texts for result in DENIED_NOUN.finditer(text)]


def test_no_program_text_has_a_retired_instruction():
    texts = [(name_of(page), page.read_text(encoding="utf-8")) for page in PAGES]
    texts += [
        (name_of(path), path.read_text(encoding="utf-8")) for path in (ROOT / "tests" / "golden").rglob("*.program")
    ]
    texts += [(f"{name_of(path)}:{line}", text) for path in FILES for text, line in strings(path)]
    placed = [(place, text) for place, text in texts if PLACE.search(text)]
    assert not [f"{place}: {result[0]}" for place, text in placed for result in RETIRED_INSTRUCTION.finditer(text)]


def test_every_term_of_the_glossary_says_where_it_comes_from():
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    entries = re.findall(
        r"^(\S[^\n]*)\n((?:  [^\n]*\n|\n(?=  ))+)", text.partition("```{glossary}")[2], flags=re.MULTILINE
    )
    assert len(entries) >= 40
    assert not [term for term, body in entries if "From:" not in body]
    terms = [term for term, _ in entries]
    assert terms == sorted(set(terms), key=str.lower)


def test_an_axis_belongs_to_a_mesh_and_a_dim_to_a_tensor():
    pattern = re.compile(r"\b(?:mesh|rank)[ _]dims?\b|\btensor[ _]ax[ei]s\b")
    assert not [name_of(path) for path in FILES if pattern.search(path.read_text(encoding="utf-8"))]


def test_nothing_is_announced_instead_of_done():
    pattern = re.compile(
        r"\b(?:TO"
        r"DO|FIX"
        r"ME|XXX|HACK)\b|raise NotImplementedError|(?i:#.*\b(?:placeholder|for now|stub|not implemented)\b)"
    )
    left = [
        f"{name_of(path)}: {result[0]}"
        for path in [*FILES, *PAGES]
        for result in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not left


def test_the_source_is_where_the_rules_look():
    assert SOURCE.is_dir()
    assert len(FILES) > 100

"""Find violations of the HTML standard's syntax."""

from tinyhtml5.parser import HTMLParser


def find_html_errors(page):
    """Positions and codes of the parse errors of a page."""
    parser = HTMLParser()
    parser.parse(page)
    return [(place, code) for place, code, _ in parser.errors]

"""What the tests of pages share: a parser that counts every breach of the HTML standard's syntax."""

from tinyhtml5.parser import HTMLParser


def find_html_errors(page):
    """Every place at which a page is not as the standard wants it, as the parser of the standard finds them."""
    parser = HTMLParser()
    parser.parse(page)
    return [(place, code) for place, code, _ in parser.errors]

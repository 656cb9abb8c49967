"""How the pages are built: Markdown, no network, every warning an error (`make docs`)."""

from importlib.metadata import version as installed_version

project = "Counterpoint"
copyright = "the Counterpoint authors"
version = release = installed_version("counterpoint")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.doctest"]
napoleon_custom_sections = ["Promise", "Cost", "Source"]
napoleon_use_rtype = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpick_ignore_regex = [("py:exc", r"\w+Error"), ("py:.*", r"(torch|nn|optim|typing|collections|Literal|Path).*")]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "Counterpoint"

# examples in docstrings are run by tests/house, in the names of their module; here only those of the pages are
doctest_test_doctest_blocks = ""

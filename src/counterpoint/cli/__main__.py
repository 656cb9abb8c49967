"""``python -m counterpoint.cli`` is the ``counterpoint`` command."""

from counterpoint.cli.main import app

if __name__ == "__main__":
    app()

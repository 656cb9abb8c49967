"""``python -m counterpoint``: the command, for where its script is not on the path."""

from counterpoint.cli.main import app

if __name__ == "__main__":
    app()

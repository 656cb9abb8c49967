"""The page of the command line says what the commands say themselves; `make golden` rewrites it."""

from typer.testing import CliRunner

from counterpoint.cli.main import COMMANDS, build_app

HEAD = """# Command line

Every command answers `--help`. It exits with 0, with 1 if it failed or missed its bar, with 2 for wrong usage, and with 130 after
Ctrl-C. This page is generated from the commands.
"""


def help_of(command):
    """Return the help of a command, as it is printed 120 columns wide."""
    result = CliRunner().invoke(build_app([command]), [command, "--help"], prog_name="counterpoint", terminal_width=120)
    assert result.exit_code == 0
    return "\n".join(line.rstrip() for line in result.output.strip().splitlines())


def test_the_page_of_the_command_line_is_what_the_commands_say(golden):
    sections = [f"## `counterpoint {command}`\n\n```text\n{help_of(command)}\n```\n" for command in COMMANDS]
    golden("../../docs/reference/cli.md", "\n".join([HEAD, *sections]))

"""`lockstep compare` in this process."""

from typer.testing import CliRunner

from lockstep.cli import _app


def compare(a, b):
    """(exit code, lines on stdout, stderr); an error of ours is no exit."""
    result = CliRunner().invoke(_app.app, ["compare", str(a), str(b)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout.splitlines(), result.stderr

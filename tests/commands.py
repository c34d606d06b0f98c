"""How tests call the command line."""

from numattn.cli import main


def run(capsys, *argv):
    """Status, standard output, standard error; a traceback would fail the test."""
    try:
        status = main([str(part) for part in argv])
    except SystemExit as stop:  # argparse
        status = stop.code
    out, err = capsys.readouterr()
    return status, out, err

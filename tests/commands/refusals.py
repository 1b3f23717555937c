"""What every refused command must do."""

from siamesenorm.cli import main


def one_sentence(arguments: list[str], capsys) -> str:
    """The error of a command that must refuse: exit code 2, one line on stderr, nothing on stdout."""
    capsys.readouterr()
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 2, (arguments, out, err)
    assert out == ""
    assert err.startswith("siamesenorm: "), err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert len(err) < 1500
    return err

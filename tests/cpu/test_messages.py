"""What people read when they have mistyped something, or ask for what can have no effect."""

from packgraph.cli import main
from packgraph.graphs.fallback import Stats


def test_nothing_dropped_is_not_counted():
    stats = Stats()
    stats.dropped("module changed", 0)
    assert not stats.recaptures
    stats.dropped("module changed", 2)
    assert stats.recaptures == {"module changed": 2}


def test_a_file_of_one_document_is_described_as_such(capsys, tmp_path):
    (tmp_path / "one.txt").write_text("a line of text\n" * 500)
    assert main(["plan", str(tmp_path / "one.txt"), "qwen3-tiny"]) == 0
    told = capsys.readouterr().out
    assert "1 document of " in told and "held out" not in told


def test_data_may_have_the_name_of_an_option(capsys, tmp_path, monkeypatch):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "one.txt").write_text("a line of text\n" * 500)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "json", "qwen3-tiny"]) == 0
    assert "1 document of " in capsys.readouterr().out


def test_a_schedule_of_few_microbatches_says_what_it_uses(capsys):
    assert (
        main(["plan", "--ranks", "2", "--chunks", "2", "--microbatches", "4", "--group", "3"]) == 0
    )
    told = " ".join(capsys.readouterr().out.split())
    assert "9 slots on the fullest rank" in told and "these microbatches use 7" in told

"""Rank 0 speaks on the terminal, every rank writes a file, and warnings are shown once with the number of ranks."""

import ranks
import speaking


def test_two_ranks(tmp_path):
    (shown, first), (silent, second) = ranks.on_two_ranks(speaking.fit, str(tmp_path))
    assert silent == ""
    for text in ("printed by 0", "\x1b[1;31m\x1b[Kred\x1b[0m\x1b[K of 0", "logged by 0", "bar of 0"):
        assert text in shown
    assert "by 1" not in shown
    assert shown.count("UserWarning: of both (on 2 of 2 ranks)\n") == 1
    assert shown.count("UserWarning: of one (on 1 of 2 ranks: 1)\n") == 1
    assert shown.count("UserWarning: of") == 2
    mine, other = first["rank_0.log"], second["rank_1.log"]
    for rank, text in enumerate((mine, other)):
        assert f"rank {rank} of 2, process " in text
        assert text.count(f"printed by {rank}\n") == text.count(f"logged by {rank}\n") == 2
        assert text.count(f"red of {rank}\n") == 2
        assert "bar of" not in text
        assert text.count("RuntimeWarning: of a loader's process\n") == 1
    assert mine.count("UserWarning") == 2
    assert other.count("UserWarning: of both\n") == other.count("UserWarning: of one\n") == 1


def test_without_a_directory_prints_go_where_they_went(tmp_path):
    outcomes = ranks.on_two_ranks(speaking.fit, str(tmp_path / "none"), False)
    assert [f"printed by {rank}" in shown for rank, (shown, _) in enumerate(outcomes)] == [True, True]
    assert not (tmp_path / "none").exists()

"""Every benchmark program answers ``--help`` without computing anything."""

from __future__ import annotations

from pathlib import Path


def test_help_of_a_benchmark_computes_nothing():
    folder = Path(__file__).parent.parent / "benchmarks"
    programs = [file for file in folder.glob("*.py") if "__main__" in file.read_text()]
    assert len(programs) > 40
    for text in (file.read_text() for file in programs):
        assert "ArgumentParser" in text or 'if __name__ == "__main__":\n    usage(__doc__)\n' in text, text[:100]

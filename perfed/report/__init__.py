"""What a run leaves behind, read back: the comparison of several runs and the HTML report."""

from perfed.report.comparison import ComparisonRow, Difference, compare_table, comparison_rows
from perfed.report.leaderboard import leaderboard
from perfed.report.load_runs import Gathered, gathered, load_runs
from perfed.report.page.write import figures, write_report
from perfed.report.run_results import reported_by, with_communication
from perfed.report.tables import all_tables, first_tables
from perfed.report.text import TextTable
from perfed.report.verdict import Verdict, verdict

__all__ = [
    "ComparisonRow",
    "Difference",
    "Gathered",
    "TextTable",
    "Verdict",
    "all_tables",
    "compare_table",
    "comparison_rows",
    "figures",
    "first_tables",
    "gathered",
    "leaderboard",
    "load_runs",
    "reported_by",
    "verdict",
    "with_communication",
    "write_report",
]

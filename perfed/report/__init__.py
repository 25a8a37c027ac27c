"""The results of runs: comparison of methods, verdict, tables and the HTML report."""

from perfed.report.comparison import ComparisonRow, Difference, compare_table, comparison_rows
from perfed.report.leaderboard import leaderboard
from perfed.report.load_runs import GatheredRuns, gather_runs, load_runs
from perfed.report.page.write import figures, write_report
from perfed.report.run_results import change_communication, describe_evaluation
from perfed.report.tables import all_tables, first_tables
from perfed.report.text import TextTable
from perfed.report.verdict import Verdict, verdict

__all__ = [
    "ComparisonRow",
    "Difference",
    "GatheredRuns",
    "TextTable",
    "Verdict",
    "all_tables",
    "change_communication",
    "compare_table",
    "comparison_rows",
    "describe_evaluation",
    "figures",
    "first_tables",
    "gather_runs",
    "leaderboard",
    "load_runs",
    "verdict",
    "write_report",
]

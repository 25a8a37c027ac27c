"""What a run leaves behind, read back: the comparison of several runs and the HTML report."""

from perfed.report.comparison import ComparisonRow, Difference, compare_table, comparison_rows
from perfed.report.html import write_report

__all__ = ["ComparisonRow", "Difference", "compare_table", "comparison_rows", "write_report"]

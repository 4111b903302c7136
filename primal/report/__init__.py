"""A run's folder -> one page: ``page.py`` says what stands on it and in which order."""

from primal.report.page import write_report

__all__ = ["write_report"]

"""A comparison: which runs (budget.py), what came of them (results.py), and the report (figures.py, report.py)."""

"""Comparisons: budgets (budget.py), measurements (measure.py, results.py), reports (figures.py, report.py)."""

"""Compares models: plans runs (budget.py), measures them (measure.py, results.py), reports
(figures.py, report.py).
"""

"""Plans the runs of a comparison, trains and measures them, and writes the report
(`comparing.compare`).
"""

"""Report of runs: one HTML file that needs no network.

read.py: recorded files of a run as plain data, thinned to a budget.
overview.py: facts of a run in words: model, data, hardware, results, warnings.
page.py: `write_report`, which makes the page of templates/; start reading there.
"""

"""Runs on disk: they are planned, launched, executed, recorded and resumed here, and have a status.

Checked runs come in; run folders below ``results/runs`` go out. This folder may import support, config, tasks,
measurement, statistics, training, algorithms and models.
"""

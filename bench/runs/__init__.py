"""Runs on disk: planned, launched, executed, recorded, resumed, and what their status is.

Checked runs come in; run folders below ``results/runs`` go out. May import support, config, tasks, measurement,
statistics and training.
"""

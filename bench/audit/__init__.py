"""Frozen rollouts: every algorithm is asked about the same data."""

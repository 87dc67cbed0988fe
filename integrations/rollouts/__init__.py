"""Rollouts and tensors of another trainer: every loss's gradient on them, and a check of its route replay."""

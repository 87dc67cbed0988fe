"""Frozen rollouts as folders: written, checked when read, converted, and audited without their model."""

"""Mixture-of-Experts models of transformers: built from a config or loaded, their routing recorded and replayed.

Numbers of a config or a local checkpoint come in; models, recorded routes and rollout engines go out. This folder
imports no other folder of the suite.
"""

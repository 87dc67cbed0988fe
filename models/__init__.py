"""transformers' own Mixture-of-Experts models: built from a config, their routing observed."""

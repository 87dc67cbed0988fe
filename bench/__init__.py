"""The pipeline from a config to a report, one verb per file."""

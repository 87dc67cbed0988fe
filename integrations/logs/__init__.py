"""The log of another trainer as a run folder: ``steadymoe-integrations import``."""

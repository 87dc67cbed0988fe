"""The pipeline from a config to a report. A folder imports only the folders below it (``tests/test_rooms.py``)."""

"""What every update has to report: measured (`record.py`), written (`journal.py`), shown
(`live.py`)."""

"""From settings to records to a curve."""

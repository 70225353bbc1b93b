"""What is on disk and what follows from it: records, their analysis, and metrics. Imports no torch."""

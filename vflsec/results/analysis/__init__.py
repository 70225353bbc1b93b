"""From records to conclusions: groups, CAP, ranking, gates, summary."""

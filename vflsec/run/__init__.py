"""From settings to records: plan, training, attacks, scores."""

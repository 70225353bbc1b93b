"""Split fine-tuning of language models: one passive party holds text, the active party the labels. A guest."""

"""Experiments: settings, plan, runner, store, scores and summary."""

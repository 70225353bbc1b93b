"""Base classes, messages, views and the registry; imports no plug-in."""

"""The encrypted linear layer between two processes, over TCP with mutual TLS."""

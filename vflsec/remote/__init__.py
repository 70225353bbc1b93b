"""Two companies, two processes: the encrypted linear layer over TCP with mutual TLS."""

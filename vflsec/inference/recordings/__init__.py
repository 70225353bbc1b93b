"""The arithmetic of attacks on recordings of the encrypted linear layer."""

"""An encrypted linear layer between two parties: arithmetic, roles, processes over a network, and audits."""
